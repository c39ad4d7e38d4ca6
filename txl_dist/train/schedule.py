"""Step to learning rate, as pure functions. `step` counts finished optimizer steps, so the first update has step 0."""

from __future__ import annotations

import math

from txl_dist.config.schema import OptimSection


def learning_rate(step: int, optim: OptimSection, *, max_steps: int) -> float:
    """Rate of the update that follows `step` finished ones.

    Linear warm-up reaches `lr` at update number `warmup_steps`. Then, with x the share of the remaining steps done:

        cosine             min + (lr - min) (1 + cos(pi x)) / 2                  NVIDIA, original TensorFlow
        cosine_from_start  the same with x = step / max_steps, so that the       original PyTorch
                           rate jumps down where the warm-up ends
        inverse_sqrt       lr sqrt(max(1, warmup) / update)                      Noam (labml) if lr is
                                                                                 1 / sqrt(width * warmup)
        linear             lr + (min - lr) x
        wsd                lr, and in the last cooldown_fraction of max_steps    MiniCPM (arXiv 2404.06395)
                           lr + (min - lr) y, y the share of these steps done
        constant           lr
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    done = min(1.0, (step - optim.warmup_steps) / max(1, max_steps - optim.warmup_steps))
    if optim.schedule == "cosine_from_start":
        done = min(1.0, step / max_steps)
    if optim.schedule in ("cosine", "cosine_from_start"):
        return optim.min_lr + (optim.lr - optim.min_lr) * (1 + math.cos(math.pi * done)) / 2
    if optim.schedule == "wsd":
        begin = max(optim.warmup_steps, max_steps * (1 - optim.cooldown_fraction))
        done = min(1.0, max(0.0, step - begin) / max(1, max_steps - begin))
    if optim.schedule in ("linear", "wsd"):
        return optim.lr + (optim.min_lr - optim.lr) * done
    if optim.schedule == "inverse_sqrt":
        return max(optim.min_lr, optim.lr * math.sqrt(max(1, optim.warmup_steps) / (step + 1)))
    return optim.lr
