"""Learning-rate schedules: the learning rate as a pure function of the step. `step` counts finished steps, so the first
update has step 0."""

from __future__ import annotations

import math

from txl_dist.config.schema import OptimSection


def learning_rate(step: int, optim: OptimSection, *, max_steps: int) -> float:
    """Return the learning rate of the next update, when `step` updates are finished.

    In the warm-up the rate grows linearly and reaches `lr` at update number `warmup_steps`. Then it depends on
    `optim.schedule`. Here min is `min_lr`, and x is the finished share of the steps after the warm-up:

        cosine             min + (lr - min) (1 + cos(pi x)) / 2                  NVIDIA, original TensorFlow
        cosine_from_start  the same with x = step / max_steps, so that the       original PyTorch
                           rate jumps down where the warm-up ends
        inverse_sqrt       lr sqrt(max(1, warmup) / update), at least min        Noam (labml) if lr is
                                                                                 1 / sqrt(width * warmup)
        linear             lr + (min - lr) x
        wsd                lr, and in the last cooldown_fraction of max_steps    MiniCPM (arXiv 2404.06395)
                           lr + (min - lr) y, y the share of these steps done
        constant           lr
    """
    lr = optim.lr
    min_lr = optim.min_lr
    warmup_steps = optim.warmup_steps
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    match optim.schedule:
        case "cosine":
            share = _share_done(step, begin=warmup_steps, end=max_steps)
            return min_lr + (lr - min_lr) * (1 + math.cos(math.pi * share)) / 2
        case "cosine_from_start":
            share = min(1.0, step / max_steps)
            return min_lr + (lr - min_lr) * (1 + math.cos(math.pi * share)) / 2
        case "linear":
            share = _share_done(step, begin=warmup_steps, end=max_steps)
            return lr + (min_lr - lr) * share
        case "wsd":
            cooldown_start = max_steps * (1 - optim.cooldown_fraction)
            share = _share_done(step, begin=max(warmup_steps, cooldown_start), end=max_steps)
            return lr + (min_lr - lr) * share
        case "inverse_sqrt":
            decay = math.sqrt(max(1, warmup_steps) / (step + 1))
            return max(min_lr, lr * decay)
    return lr


def _share_done(step: int, *, begin: float, end: int) -> float:
    """Return the share of the steps from `begin` to `end` that are finished at `step`, between 0 and 1."""
    num_steps = max(1, end - begin)
    num_done = max(0.0, step - begin)
    return min(1.0, num_done / num_steps)
