"""The engine: forward, backward, gradient exchange and update. The only file that imports DeepSpeed.

The loop speaks to the `Engine` protocol. `ZeroEngine` fulfils it with DeepSpeed's ZeRO stages 0 to 3. What DeepSpeed
would do in secret is either set explicitly in `deepspeed_config` or done here: the learning rate is set by the loop,
gradients are averaged over micro-batches and ranks by DeepSpeed. Their norm is taken before the step and decides, once,
whether it is made: DeepSpeed's own checks are given that norm, or infinity, and clean up as they do after an overflow.
Clipping and the loss scale are one number, known on the host; on a GPU torch's fused optimizers divide by it. Its
checkpoint files are not used: weights and optimizer state go out and in as named fragments (`partitions`).
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from txl_dist.config.load import BatchPlan, Config
from txl_dist.config.registry import plugin_errors
from txl_dist.config.schema import OPTIMIZERS
from txl_dist.distributed.collectives import (
    RankInfo,
    all_reduce_sum,
    gather_objects,
    run_on_all_ranks,
    set_timeout,
    uses_gpu,
)
from txl_dist.errors import TrainingError, raised_everywhere
from txl_dist.inference.bundle import copy_weights
from txl_dist.model.block import Block
from txl_dist.model.memory import Memory
from txl_dist.model.transformer_xl import Batch, SegmentLoss, TransformerXL
from txl_dist.rng import derive_seed
from txl_dist.train.engine.cuda_graph import GraphedModule
from txl_dist.train.engine.deepspeed_config import deepspeed_config
from txl_dist.train.engine.flat import FlatModule, named_values, stored_whole
from txl_dist.train.engine.muon import Matrix, MatrixAssignment, Muon, matrices_of
from txl_dist.train.engine.optimizer import build_optimizer
from txl_dist.train.engine.partitions import (
    Fragment,
    Source,
    fill,
    fragments,
    group_values,
    norms_of,
    partitions_of,
    squared_norms,
    swap_averages,
    unkept_state,
    update_averages,
)
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.engine.zero3_saved_tensors import saves_no_weights


class ZeroEngine(Engine):
    """`Engine` by DeepSpeed ZeRO."""

    def __init__(
        self,
        config: Config,
        *,
        vocab_size: int,
        plan: BatchPlan,
        ranks: RankInfo,
        weights: dict[str, Tensor] | None = None,
    ) -> None:
        """`weights` to begin with, the same on every rank; None draws them."""
        deepspeed = import_deepspeed()
        self._is_closed = False
        # Of products of fp32 alone; containers for GPUs may allow TF32 where nobody has asked for it.
        torch.set_float32_matmul_precision("high" if config.engine.precision == "tf32" else "highest")
        # Every rank draws the same weights; at stage 3 each keeps its part of them.
        torch.manual_seed(derive_seed(config.run.seed, "init"))
        model = TransformerXL(
            config.model,
            vocab_size=vocab_size,
            recompute_every=config.engine.recompute_every if config.engine.activation_checkpointing else 0,
            attention=config.engine.attention,
            memory_lens=config.train.memory_lens,
        )
        if weights is not None:
            copy_weights(model, weights)
        self.shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
        # Of what the optimizer treats apart; with others none.
        matrices = [one for name, shape in self.shapes.items() for one in matrices_of(name, shape)]
        apart = {one.parameter for one in matrices} if config.optim.kind.orthogonalizes else set()
        block_len = sum(parameter.numel() for parameter in model.blocks[0].parameters())
        module: nn.Module = SegmentLoss(model).to(ranks.device)
        # At stage 3 views would keep gathered layers alive.
        if config.engine.zero_stage == 3 or config.optim.kind.needs_whole_tensors:
            self.stored = stored_whole(module, prefix=_PREFIX)
        else:
            module = FlatModule(module, prefix=_PREFIX, matrices=apart)
            self.stored = module.stored
        if config.engine.replays(on_gpu=ranks.device.type == "cuda"):
            module = GraphedModule(module, scale=lambda: self._scale() / plan.num_microbatches)
        self._clip_norm, self._decay = config.optim.clip_norm, config.optim.ema_decay
        self._plugin_optimizer = config.optim.name if config.optim.kind.build is not None else ""
        self._stage = config.engine.zero_stage
        self._offloads = config.engine.offload_optimizer
        if self._stage == 3:
            deepspeed.utils.set_z3_leaf_modules(module, [Block])  # one gathering per block, not one per layer in it
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=module,
            optimizer=build_optimizer(
                ((one.slots[0].name, one.tensor) for one in self.stored), config.optim, matrices=apart
            ),
            config=deepspeed_config(config.engine, plan=plan, block_len=block_len, on_gpu=ranks.device.type == "cuda"),
        )
        set_timeout(timeout_s=config.engine.start_timeout_s)
        self.model, self._device = model, ranks.device
        if self._stage == 3:
            _reduce_with_first(self._optimizer.leaf_parameters, list(model.blocks))
        self._base_optimizer = getattr(self._optimizer, "optimizer", self._optimizer)
        # On a CPU steps stay the product with a factor that they were: a quotient differs in the last bits.
        on_gpu, is_fused = ranks.device.type == "cuda", self._base_optimizer.defaults.get("fused", False)
        self._update_divides = on_gpu and is_fused and not self._offloads
        self._partitions = partitions_of(self._optimizer, self.stored, stage=self._stage)
        if isinstance(self._base_optimizer, Muon):
            self._divide(self._base_optimizer, matrices, ranks, in_half=on_gpu and config.engine.precision == "bf16")
        self._take_over_checks()
        if hasattr(self._optimizer, "fp32_groups"):
            # Stage 0 in half precision took a step of zeros, which Adam would count as its first.
            self._base_optimizer.state.clear()
            for group in self._base_optimizer.param_groups:
                group.pop("step", None)
        if self._stage == 0 and ranks.world_size == 1:
            # DeepSpeed would join all gradients, exchange them with nobody and part them.
            self._engine.enable_backward_allreduce = False

    def _divide(self, optimizer: Muon, matrices: list[Matrix], ranks: RankInfo, *, in_half: bool) -> None:
        """Tell all ranks which of them holds what of the matrices. At stage 0 all are updated together."""
        held = gather_objects([[(*piece,) for piece in one.pieces] for one in self._partitions])
        names = {matrix.parameter for matrix in matrices}
        apart = [i for i in range(len(self._partitions)) if any(piece[0] in names for own in held for piece in own[i])]
        divisions = {
            id(self._partitions[unit[0]].tensor): MatrixAssignment(
                matrices, [[own[i] for i in unit] for own in held], rank=ranks.rank, is_replicated=self._stage == 0
            )
            for unit in ([apart] if self._stage == 0 else [[i] for i in apart])
        }
        optimizer.divide(divisions, dtype=torch.bfloat16 if in_half else torch.float32, device=ranks.device)

    def _take_over_checks(self) -> None:
        """Let DeepSpeed's optimizers ask us, not all gradients once more, for the norm and whether it is finite, and
        leave the scaling of gradients to us: all of it is known on the host."""
        optimizer = self._optimizer
        self._given_norm, self._factor = 0.0, 1.0
        if hasattr(optimizer, "check_overflow"):  # stages 1 to 3; they go on to look at the norm
            _replace(optimizer, "check_overflow", lambda partition_gradients=True: None)
        if self._stage in (1, 2):
            self._compute_norm = _replace(optimizer, "scaled_global_norm", lambda: self._given_norm)
            _replace(optimizer, "unscale_and_clip_grads", lambda gradients, norm: self._rescale(gradients))
        elif self._stage == 3:
            compute_norms = _replace(optimizer, "_get_norm_groups", lambda: [self._given_norm])
            self._compute_norm = lambda: _joined_norm(compute_norms())
            groups = optimizer.fp32_partitioned_groups_flat
            _replace(optimizer, "unscale_and_clip_grads", lambda index, norm: self._rescale([groups[index].grad]))
        elif hasattr(optimizer, "fp32_groups"):  # stage 0 in half precision
            _replace(optimizer, "step", self._step_masters)
        if self._stage and self._device.type == "cuda" and not self._offloads:
            self._take_over_gradients()
        if hasattr(scaler := _loss_scaler(optimizer), "raise_error_at_min_scale"):
            scaler.raise_error_at_min_scale = False  # `guard` ends the run, and says why

    def _take_over_gradients(self) -> None:
        """On a GPU DeepSpeed's norm copies each gradient in fp64 and waits for the device in every group, and it joins
        gradients before it converts them. On a CPU that stays: where steps are clipped, losses would differ in the last
        bits from those of earlier versions."""
        self._compute_norm = lambda: norm_over_ranks(
            [part for group in self._optimizer.averaged_gradients.values() for part in group]
        )
        if self._stage in (1, 2):
            self._joined = _replace(self._optimizer, "_get_preflattened_grad_partition", self._join_gradients)

    def _join_gradients(self, index: int) -> Tensor:
        """This rank's gradients of a group of parameters as one tensor in fp32."""
        joined: Tensor | None = self._joined(index)
        if joined is None:
            joined = torch.empty_like(self._optimizer.single_partition_of_fp32_groups[index].detach())
            pieces = [piece.view(-1) for piece in self._optimizer.averaged_gradients[index]]
            lengths = [piece.numel() for piece in pieces]
            *parts, padding = joined.split([*lengths, joined.numel() - sum(lengths)])
            torch._foreach_copy_(parts, pieces)
            padding.zero_()
        return joined

    @override
    def named_values(self) -> Iterator[tuple[str, Tensor]]:
        return named_values(self.stored)

    @override
    def forward(self, batch: Batch, memory: Memory, *, normalizer: Tensor | float) -> tuple[Tensor, Memory]:
        with saves_no_weights() if self._stage == 3 else nullcontext():
            loss, memory = self._engine(batch, memory, normalizer)
        return loss, memory

    @override
    def backward(self, loss: Tensor) -> None:
        # In fp16 DeepSpeed multiplies the loss by its scale from stage 1 on only. A recorded micro-step has done it.
        if self._stage == 0 and (scale := self._scale()) != 1.0:
            loss = loss * scale
        self._engine.backward(loss)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()  # DeepSpeed counts micro-batches here; the update itself is `step`'s

    @override
    def grad_norm(self) -> Tensor:
        if self._stage == 0:
            norm = torch.linalg.vector_norm(norms_of([p.grad for p in self._parameters() if p.grad is not None]))
        else:
            if hasattr(self._optimizer, "_wait_for_offload_copies"):
                self._optimizer._wait_for_offload_copies()
            norm = self._compute_norm()
        norm = norm.detach().float().to(self._device) / self._scale()  # with offload it is on the host
        # DeepSpeed writes -1 for what is not finite.
        return torch.where(norm < 0, torch.full_like(norm, torch.inf), norm)

    @override
    def squared_norms(self) -> dict[str, list[float]]:
        sums = squared_norms(self._partitions, [self._gradients(i) for i in range(len(self._partitions))], self.shapes)
        sums[0] /= self._scale() ** 2
        sums = sums.to(self._device)  # with offload they are on the host
        return dict(zip(self.shapes, (all_reduce_sum(sums) if self._stage else sums).t().tolist(), strict=True))

    def _gradients(self, index: int) -> list[Tensor]:
        """Of a partition: what its values' gradients are in, one tensor behind the other."""
        optimizer, tensor = self._optimizer, self._partitions[index].tensor
        if self._stage == 0:
            masters = hasattr(optimizer, "fp32_groups")
            of = next(p for m, p in _masters(optimizer) if m is tensor) if masters else tensor
            return [] if of.grad is None else [of.grad.view(-1)]
        if self._offloads:
            return [] if tensor.grad is None else [tensor.grad.view(-1)]
        return [part.view(-1) for part in optimizer.averaged_gradients[index]]

    @override
    def step(self, *, lr: float, grad_norm: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        # On the host: no check of DeepSpeed's waits for the device again.
        self._given_norm = grad_norm * self._scale()
        clip = max(1.0, (grad_norm + 1e-6) / self._clip_norm) if self._clip_norm else 1.0
        self._divide_gradients(clip * self._scale())
        if self._optimizer is self._base_optimizer:  # stage 0 in fp32
            if math.isfinite(grad_norm):
                self._rescale([p.grad for p in self._parameters() if p.grad is not None])
            else:
                for parameter in self._parameters():
                    parameter.grad = None  # the optimizer passes over what has none
        if self._plugin_optimizer:
            self._step_plugin(self._plugin_optimizer)
        else:
            self._engine.step()
        if self._decay and math.isfinite(grad_norm):
            update_averages(self._partitions, self._base_optimizer, decay=self._decay)

    def _step_plugin(self, name: str) -> None:
        """The update by a plugin's optimizer. Raises TrainingError for state that a checkpoint would lose."""
        before = group_values(self._base_optimizer)
        with plugin_errors(OPTIMIZERS, name, what="optimizer", kind=TrainingError):
            self._engine.step()
        lost = unkept_state(self._partitions, self._base_optimizer)
        for old, new in zip(before, group_values(self._base_optimizer), strict=True):
            lost = lost or next((f"group[{key!r}]" for key in new if old.get(key) != new[key]), "")
        if lost:
            raise raised_everywhere(
                TrainingError(
                    f"optim.name = {name!r}: {type(self._base_optimizer).__name__} keeps {lost}, which a checkpoint "
                    "would lose. Keep fp32 tensors of the parameter's shape, and count updates in state['step'], an "
                    "fp32 tensor with one number."
                )
            )

    def _divide_gradients(self, divisor: float) -> None:
        """In the update to come: clip, and take the loss scale out. torch's fused optimizers do it as they read the
        gradients, which saves a pass over them."""
        if self._update_divides:
            scale = None if divisor == 1.0 else torch.full((), divisor, dtype=torch.float32, device=self._device)
            self._base_optimizer.grad_scale, self._factor = scale, 1.0
        else:
            self._factor = 1.0 / divisor

    def _rescale(self, gradients: list[Tensor]) -> None:
        """Multiply by what the optimizer does not divide by."""
        if self._factor != 1.0:
            torch._foreach_mul_(gradients, self._factor)

    def _step_masters(self) -> None:
        """The update at stage 0 in half precision; DeepSpeed's would wait for the device four times more."""
        optimizer = self._optimizer
        optimizer.overflow = not math.isfinite(self._given_norm)
        if optimizer.overflow:
            optimizer._skip_invalid_grad_norm()
            return
        optimizer._update_scale(False)
        pairs = [(m, p) for m, p in _masters(optimizer) if p.grad is not None]
        for master, parameter in pairs:
            master.grad = parameter.grad.to(master.dtype)
        self._rescale([master.grad for master, _ in pairs])
        self._base_optimizer.step()
        torch._foreach_copy_([parameter.data for _, parameter in pairs], [master.data for master, _ in pairs])
        for master, _ in pairs:
            master.grad = None

    def _parameters(self) -> list[Tensor]:
        return [one.tensor for one in self.stored]

    def _scale(self) -> float:
        """What fp16 multiplies the loss by."""
        return float(getattr(self._optimizer, "loss_scale", 1.0))

    @override
    def losses(self, batch: Batch, memory: Memory, *, with_hits: bool = False) -> tuple[Tensor, Memory]:
        return self._infer(batch, memory, None, False, with_hits)

    @override
    def predict(self, batch: Batch, memory: Memory) -> tuple[Tensor, Memory]:
        return self._infer(batch, memory, None, True)

    def _infer(self, *arguments: Any) -> tuple[Tensor, Memory]:
        self._engine.module.eval()
        try:
            with torch.no_grad():
                result, memory = self._engine.module(*arguments)
        finally:
            self._engine.module.train()
        return result, memory

    @override
    def empty_memory(self, *, num_lanes: int, memory_len: int) -> Memory:
        return self.model.empty_memory(num_lanes=num_lanes, memory_len=memory_len)

    @override
    def fragments(self) -> list[Fragment]:
        return list(fragments(self._partitions, self._base_optimizer))

    @override
    def loss_scale(self) -> dict[str, Any]:
        scaler = _loss_scaler(self._optimizer)
        return {name: getattr(scaler, name) for name in _SCALER_STATE if hasattr(scaler, name)}

    @override
    def load(self, source: Source, *, loss_scale: dict[str, Any]) -> None:
        with self._changing_weights():
            keeps = self._decay > 0
            run_on_all_ranks(lambda: fill(self._partitions, self._base_optimizer, source, with_average=keeps))
        scaler = _loss_scaler(self._optimizer)
        for name in _SCALER_STATE:
            if name in loss_scale and hasattr(scaler, name):
                setattr(scaler, name, loss_scale[name])

    @override
    def swap_averages(self) -> None:
        with self._changing_weights():
            swap_averages(self._partitions, self._base_optimizer)

    @contextmanager
    def _changing_weights(self) -> Iterator[None]:
        """Of the fp32 weights, which are changed within, the ones are made that the model computes with."""
        optimizer = self._optimizer
        if self._stage == 3:
            optimizer.checkpoint_event_prologue()
        yield
        if self._stage in (1, 2):
            optimizer.update_lp_params()
        elif self._stage == 3:
            for index in range(len(self._partitions)):
                optimizer._reassign_or_swap_out_partitioned_parameters(index)
            optimizer.checkpoint_event_epilogue()
        elif hasattr(optimizer, "fp32_groups"):
            for master, parameter in _masters(optimizer):
                parameter.data.copy_(master.data)

    @override
    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        module = self._engine.module
        self._engine.destroy()  # removes the hooks through which gradients keep it alive
        # At stage 3 DeepSpeed keeps the module (in FWD_MODULE_STACK and the cache of __params_to_release), and with it
        # the rest, until the process ends. So that this costs no memory, everything that holds values is emptied.
        vars(module).pop("ds_inflight_param_registry", None)
        for part in module.modules():  # a flat module has given its parts views
            views = [name for name, value in vars(part).items() if isinstance(value, Tensor)]
            for name in views:
                del vars(part)[name]
        for parameter in module.parameters():
            parameter.grad = None
            parameter.data = parameter.data.new_empty(0)
            vars(parameter).clear()
        offload = getattr(self._optimizer, "parameter_offload", None)
        coordinator = getattr(offload, "param_coordinator", None)
        for held in (coordinator, offload, self._optimizer, self._base_optimizer, self._engine):
            if held is not None:
                vars(held).clear()
        self.stored, self._partitions = [], []


_PREFIX = "model."
"""Of the names of parameters in a `SegmentLoss`."""
_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def _masters(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """(fp32 weight, the parameter made of it) at stage 0 in half precision."""
    for masters, parameters in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        yield from zip(masters, parameters, strict=True)


def _loss_scaler(optimizer: Any) -> Any:
    """What keeps the loss scale in fp16, or None: under one name in ZeRO, another at stage 0."""
    scaler = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
    return scaler if getattr(scaler, "dynamic", False) or getattr(scaler, "dynamic_loss_scale", False) else None


def _replace(optimizer: Any, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Put a method of ours in the place of DeepSpeed's, and return that. Raises TrainingError if it has none."""
    original: Callable[..., Any] | None = getattr(optimizer, name, None)
    if original is None:
        raise TrainingError(
            f"DeepSpeed's {type(optimizer).__name__} has no {name} any more, without which gradients would not be "
            "clipped. Install the version that constraints.txt names."
        )
    setattr(optimizer, name, method)
    return original


def _reduce_with_first(leaf_parameters: dict[nn.Module, list[nn.Parameter]], blocks: list[nn.Module]) -> None:
    """At stage 3 the gradients of a block are exchanged by a hook behind its backward pass. DeepSpeed puts parameters
    that blocks share into the list of the last one, whose pass is the first to end: their gradients, which are whole
    only behind the first block, would be exchanged too early, and lost. Its hooks read these lists when they run."""
    shared = {id(parameter) for parameter in blocks[0].parameters()}
    late = [parameter for block in blocks[1:] for parameter in leaf_parameters[block] if id(parameter) in shared]
    for block in blocks[1:]:
        leaf_parameters[block][:] = [parameter for parameter in leaf_parameters[block] if id(parameter) not in shared]
    leaf_parameters[blocks[0]].extend(late)
    for parameter in late:
        parameter.ds_z3_leaf_module = blocks[0]  # type: ignore[attr-defined]


def norm_over_ranks(parts: list[Tensor]) -> Tensor:
    """The norm, in fp32, of what all ranks have parts of; each value lies on one rank alone, or is 0 of a padding.

    One reduction; nothing waits, nothing of the size of a gradient is made. Infinite from 1.8e19 on.
    """
    return all_reduce_sum(torch.stack(torch._foreach_norm(parts, 2, torch.float32)).square().sum()).sqrt()


def _joined_norm(norms: list[Tensor]) -> Tensor:
    """The norm of all groups; infinite if DeepSpeed wrote -1 for one of them."""
    stacked = torch.stack(norms)
    return torch.where((stacked < 0).any(), torch.inf, torch.linalg.vector_norm(stacked))


def import_deepspeed() -> Any:
    """Import on first use (it takes seconds), on the right accelerator and without its chatter."""
    if not uses_gpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # Unless a launcher says how many ranks this node has, DeepSpeed would start a program in every step to count.
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    import deepspeed
    from deepspeed.utils import logger as deepspeed_logger
    from deepspeed.utils import nvtx

    nvtx.enable_nvtx = False  # a range around each of a thousand calls per step

    # None of its extensions, which are probed, by compilers and on GPUs, when they are first asked for: only one is,
    # for inference on CPUs: compiled for half a minute at the first start, 67 MB of shared memory per rank that outlive
    # a killed job, and over several machines a wait without end.
    deepspeed.ops.__compatible_ops__ = {}

    deepspeed_logger.setLevel(logging.WARNING)
    # Ours that it does not know are tested by us.
    deepspeed_logger.addFilter(lambda record: "untested optimizer" not in record.getMessage())
    # DeepSpeed still calls collectives by names that the newest torch renames; users can do nothing about it.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    return deepspeed
