"""The engine: forward and backward pass, gradient exchange and update. Only this file imports DeepSpeed's engine.

The loop uses the `Engine` protocol. `ZeroEngine` implements it with DeepSpeed's ZeRO stages 0 to 3. DeepSpeed's hidden
defaults are set explicitly in `deepspeed_config` or replaced here:

    learning rate          set by the loop
    gradients              averaged over micro-batches and ranks by DeepSpeed
    norm                   computed once, before the step. The step is skipped if the norm is not finite
    DeepSpeed's checks     receive this norm. If it is infinite, DeepSpeed cleans up as after an overflow
    clipping, loss scale   one number, known on the host. On a GPU or in bf16 the optimizers divide by it
    Adam on a GPU          a kernel reads the gradients as they are and writes the model's weights (`adam_update`)
    checkpoints            named fragments of weights and optimizer state (`partitions`), not DeepSpeed's files
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
from txl_dist.fault_injection import failpoint
from txl_dist.inference.bundle import copy_weights
from txl_dist.model.block import Block
from txl_dist.model.memory import Memory
from txl_dist.model.transformer_xl import Batch, SegmentLoss, TransformerXL
from txl_dist.rng import derive_seed
from txl_dist.train.engine.adam_update import kernel_updates, update_group
from txl_dist.train.engine.cuda_graph import GraphedModule
from txl_dist.train.engine.deepspeed_config import deepspeed_config
from txl_dist.train.engine.flat import FlatModule, named_values, stored_whole
from txl_dist.train.engine.muon import Matrix, MatrixAssignment, Muon, RankPieces, matrices_of
from txl_dist.train.engine.optimizer import build_optimizer
from txl_dist.train.engine.padding import PaddedAxes, pad_widths, pads_widths, stored_shapes
from txl_dist.train.engine.partitions import (
    Fragment,
    PartitionState,
    Source,
    fill,
    fragments,
    group_values,
    norms_of,
    partition_states,
    partitions_of,
    squared_norms,
    swap_averages,
    unkept_state,
    update_averages,
)
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.engine.regroup import empty_engine
from txl_dist.train.engine.zero3_saved_tensors import saves_no_weights


class ZeroEngine(Engine):
    """Implementation of `Engine` with DeepSpeed's ZeRO stages 0 to 3."""

    def __init__(
        self,
        config: Config,
        *,
        vocab_size: int,
        plan: BatchPlan,
        ranks: RankInfo,
        weights: dict[str, Tensor] | None = None,
    ) -> None:
        """Build the model, DeepSpeed's engine and the optimizer. All ranks call it together.

        `weights` are the initial weights, the same on every rank. Without `weights` the model starts with random
        weights. Raises TxlError if the settings do not fit together.
        """
        deepspeed = import_deepspeed()
        on_gpu = ranks.device.type == "cuda"
        self._is_closed = False
        self._device = ranks.device
        self._stage = config.engine.zero_stage
        self._offloads = config.engine.offload_optimizer
        self._clip_norm = config.optim.clip_norm
        self._decay = config.optim.ema_decay
        if config.optim.kind.build is not None:
            self._plugin_optimizer = config.optim.name
        else:
            self._plugin_optimizer = ""
        # This is about products of fp32 alone. Containers for GPUs may allow TF32 though nobody has asked for it.
        torch.set_float32_matmul_precision("high" if config.engine.precision == "tf32" else "highest")
        _sum_products_in_fp32()
        self.model = _build_model(config, vocab_size=vocab_size, weights=weights)
        self.shapes = {name: list(parameter.shape) for name, parameter in self.model.named_parameters()}
        self._padded: dict[str, PaddedAxes] = {}
        kinds = (config.model.scheme, config.optim.kind)
        if pads_widths(config.engine.pad_widths, on_gpu=on_gpu, kinds=kinds):
            self._padded = pad_widths(self.model)
        stored = stored_shapes(self.shapes, self._padded)
        matrices: list[Matrix] = []
        for name, shape in self.shapes.items():
            matrices += matrices_of(name, shape, stored=stored[name])
        if config.optim.kind.orthogonalizes:
            matrix_names = {matrix.parameter for matrix in matrices}
        else:
            matrix_names = set()
        block_len = sum(parameter.numel() for parameter in self.model.blocks[0].parameters())
        module = self._store_parameters(config, matrix_names)
        if config.engine.replays(on_gpu=on_gpu):
            module = GraphedModule(module, scale=lambda: self._scale() / plan.num_microbatches)
        if self._stage == 3:
            deepspeed.utils.set_z3_leaf_modules(module, [Block])  # gathers once per block, not once per layer in it
        named_tensors = ((stored.slots[0].name, stored.tensor) for stored in self.stored)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=module,
            optimizer=build_optimizer(named_tensors, config.optim, matrices=matrix_names),
            config=deepspeed_config(config.engine, plan=plan, block_len=block_len, on_gpu=on_gpu),
        )
        failpoint("build", step=0)
        set_timeout(timeout_s=config.engine.start_timeout_s)
        self._base_optimizer = getattr(self._optimizer, "optimizer", self._optimizer)
        self._partitions = partitions_of(self._optimizer, self.stored, stage=self._stage)
        # On a CPU in fp32 DeepSpeed's functions and a factor on the gradients are kept. Other functions and a quotient
        # would change the last bits of results of earlier versions.
        may_round = (on_gpu or config.engine.precision == "bf16") and not self._offloads
        is_fused = self._base_optimizer.defaults.get("fused", False)
        first_tensor = self._partitions[0].tensor
        self._updates_by_kernel = self._stage in (1, 2) and kernel_updates(
            self._base_optimizer, first_tensor, setting=config.engine.attention
        )
        self._update_divides = may_round and is_fused and not self._updates_by_kernel
        if isinstance(self._base_optimizer, Muon):
            in_half = on_gpu and config.engine.precision == "bf16"
            self._assign_matrices(self._base_optimizer, matrices, ranks, in_half=in_half)
        self._take_over_checks()
        if self._stage and may_round:
            self._take_over_gradients()
        self._correct_deepspeed(ranks)

    def _store_parameters(self, config: Config, matrix_names: set[str]) -> nn.Module:
        """Move the model to the device, in flat parameters where possible, and return the module to train.

        This sets `stored`. At stage 3 each parameter stays a tensor of its own, because views of a flat parameter would
        keep gathered layers alive.
        """
        module = SegmentLoss(self.model).to(self._device)
        if self._stage == 3 or config.optim.kind.needs_whole_tensors:
            self.stored = stored_whole(module, prefix=_PREFIX)
            return module
        flat_module = FlatModule(module, prefix=_PREFIX, matrices=matrix_names)
        self.stored = flat_module.stored
        return flat_module

    def _assign_matrices(self, optimizer: Muon, matrices: list[Matrix], ranks: RankInfo, *, in_half: bool) -> None:
        """Assign the matrices to ranks, and give the assignment to the optimizer. All ranks call this method together.

        The ranks first exchange which values of the matrices each rank holds. At stage 0 all partitions are updated
        together. At other stages each partition is updated by itself.
        """
        local_pieces: RankPieces = []
        for partition in self._partitions:
            local_pieces.append(
                [(piece.parameter, piece.start, piece.offset, piece.length) for piece in partition.pieces]
            )
        pieces_by_rank = gather_objects(local_pieces)
        names = {matrix.parameter for matrix in matrices}
        with_matrices = []
        for index in range(len(self._partitions)):
            pieces = [piece for partitions in pieces_by_rank for piece in partitions[index]]
            if any(parameter in names for parameter, *_ in pieces):
                with_matrices.append(index)
        if self._stage == 0:
            groups = [with_matrices]
        else:
            groups = [[index] for index in with_matrices]
        assignments = {}
        for group in groups:
            group_pieces = []
            for partitions in pieces_by_rank:
                group_pieces.append([partitions[index] for index in group])
            first_tensor = self._partitions[group[0]].tensor
            assignments[id(first_tensor)] = MatrixAssignment(
                matrices, group_pieces, rank=ranks.rank, is_replicated=self._stage == 0
            )
        optimizer.assign(assignments, dtype=torch.bfloat16 if in_half else torch.float32, device=ranks.device)

    def _correct_deepspeed(self, ranks: RankInfo) -> None:
        """Undo changes that DeepSpeed's initialization made, if they would change results or cost time."""
        if self._stage == 3:
            _reduce_with_first(self._optimizer.leaf_parameters, list(self.model.blocks))
        if hasattr(self._optimizer, "fp32_groups"):
            # Stage 0 in half precision made a step of zeros, which Adam would count as its first.
            self._base_optimizer.state.clear()
            for group in self._base_optimizer.param_groups:
                group.pop("step", None)
        if self._stage == 0 and ranks.world_size == 1:
            # DeepSpeed would join all gradients, exchange them with no other rank, and split them again.
            self._engine.enable_backward_allreduce = False
        if self._stage == 1 and ranks.world_size == 1 and not self._offloads:
            self._keep_gradients()

    def _keep_gradients(self) -> None:
        """Make DeepSpeed leave the gradients where the backward pass writes them, on one rank at stage 1.

        DeepSpeed would copy all gradients twice, divide them by 1, and exchange them with no other rank.
        """
        for name in ("setup_buckets", "reduce_ready_partitions_and_remove_grads", "reduce_ipg_grads"):
            _replace(self._optimizer, name, lambda *_, **__: None)

    def _take_over_checks(self) -> None:
        """Make DeepSpeed's optimizers use the gradient norm that is already on the host. This class then scales the
        gradients.

        Otherwise DeepSpeed would read all gradients again, to compute the norm and to check whether it is finite.
        """
        optimizer = self._optimizer
        self._given_norm = 0.0
        self._divisor = 1.0
        self._factor = 1.0
        if hasattr(optimizer, "check_overflow"):  # stages 1 to 3, which look at the norm next
            _replace(optimizer, "check_overflow", lambda partition_gradients=True: None)
        if self._stage in (1, 2):
            self._compute_norm = _replace(optimizer, "scaled_global_norm", lambda: self._given_norm)
            _replace(optimizer, "unscale_and_clip_grads", lambda gradients, norm: self._rescale(gradients))
            if self._updates_by_kernel:
                _replace(optimizer, "step", self._step_partitions)
        elif self._stage == 3:
            compute_norms = _replace(optimizer, "_get_norm_groups", lambda: [self._given_norm])
            self._compute_norm = lambda: _joined_norm(compute_norms())
            groups = optimizer.fp32_partitioned_groups_flat
            _replace(optimizer, "unscale_and_clip_grads", lambda index, norm: self._rescale([groups[index].grad]))
        elif hasattr(optimizer, "fp32_groups"):  # stage 0 in half precision
            _replace(optimizer, "step", self._step_masters)
        scaler = _loss_scaler(optimizer)
        if hasattr(scaler, "raise_error_at_min_scale"):
            scaler.raise_error_at_min_scale = False  # `guard` ends the run, and says why

    def _take_over_gradients(self) -> None:
        """Replace the functions of DeepSpeed that compute the norm and join the gradients, on a GPU or in bf16.

        DeepSpeed's norm copies each gradient in fp64 and waits for the device in every group. DeepSpeed also joins
        gradients before it converts them.
        """
        self._compute_norm = self._norm_over_ranks
        if self._stage in (1, 2):
            self._joined = _replace(self._optimizer, "_get_preflattened_grad_partition", self._join_gradients)

    def _norm_over_ranks(self) -> Tensor:
        """Return the norm of the gradients of all groups and ranks."""
        groups = self._optimizer.averaged_gradients.values()
        return norm_over_ranks([part for group in groups for part in group])

    def _join_gradients(self, index: int) -> Tensor:
        """Return this rank's gradients of a group of parameters as one tensor in fp32."""
        joined: Tensor | None = self._joined(index)
        if joined is not None:
            return joined
        joined = torch.empty_like(self._optimizer.single_partition_of_fp32_groups[index].detach())
        pieces = [piece.view(-1) for piece in self._optimizer.averaged_gradients[index]]
        lengths = [piece.numel() for piece in pieces]
        *parts, padding = joined.split([*lengths, joined.numel() - sum(lengths)])
        torch._foreach_copy_(parts, pieces)
        padding.zero_()
        return joined

    @override
    def named_values(self) -> Iterator[tuple[str, Tensor]]:
        for name, values in named_values(self.stored):
            if name in self._padded and values.numel():
                yield name, self._padded[name].unpad(values)
            else:
                yield name, values

    @override
    def forward(self, batch: Batch, memory: Memory, *, normalizer: Tensor | float) -> tuple[Tensor, Memory]:
        with saves_no_weights() if self._stage == 3 else nullcontext():
            loss, memory = self._engine(batch, memory, normalizer)
        return loss, memory

    @override
    def backward(self, loss: Tensor) -> None:
        # In fp16 DeepSpeed multiplies the loss by its scale at stages 1 to 3 only. A recorded micro-step has done it.
        scale = self._scale()
        if self._stage == 0 and scale != 1.0:
            loss = loss * scale
        self._engine.backward(loss)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()  # DeepSpeed counts micro-batches here; the update itself is `step`'s

    @override
    def grad_norm(self) -> Tensor:
        if self._stage == 0:
            norm = torch.linalg.vector_norm(norms_of(self._whole_gradients()))
        else:
            if hasattr(self._optimizer, "_wait_for_offload_copies"):
                self._optimizer._wait_for_offload_copies()
            norm = self._compute_norm()
        norm = norm.detach().float().to(self._device) / self._scale()  # with offload it is on the host
        # DeepSpeed writes -1 for a norm that is not finite.
        return torch.where(norm < 0, torch.full_like(norm, torch.inf), norm)

    def _whole_gradients(self) -> list[Tensor]:
        """Return the gradients of all parameters that have a gradient, at ZeRO stage 0."""
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]

    @override
    def squared_norms(self) -> dict[str, list[float]]:
        gradients = [self._gradients(index) for index in range(len(self._partitions))]
        sums = squared_norms(self._partitions, gradients, self.shapes)
        sums[0] /= self._scale() ** 2
        sums = sums.to(self._device)  # with offload they are on the host
        if self._stage:
            sums = all_reduce_sum(sums)
        return dict(zip(self.shapes, sums.t().tolist(), strict=True))

    def _gradients(self, index: int) -> list[Tensor]:
        """Return the gradients of the partition with this index, as flat tensors in the order of the partition's
        values."""
        optimizer = self._optimizer
        tensor = self._partitions[index].tensor
        if self._stage == 0:
            parameter = tensor
            if hasattr(optimizer, "fp32_groups"):
                parameter = next(parameter for master, parameter in _masters(optimizer) if master is tensor)
            if parameter.grad is None:
                return []
            return [parameter.grad.view(-1)]
        if self._offloads:
            if tensor.grad is None:
                return []
            return [tensor.grad.view(-1)]
        return [part.view(-1) for part in optimizer.averaged_gradients[index]]

    @override
    def step(self, *, lr: float, grad_norm: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        # A number on the host, so that no check of DeepSpeed's waits for the device again.
        self._given_norm = grad_norm * self._scale()
        if self._clip_norm:
            clip = max(1.0, (grad_norm + 1e-6) / self._clip_norm)
        else:
            clip = 1.0
        self._divide_gradients(clip * self._scale())
        if self._optimizer is self._base_optimizer:  # stage 0 in fp32
            if math.isfinite(grad_norm):
                self._rescale(self._whole_gradients())
            else:
                for parameter in self._parameters():
                    parameter.grad = None  # the optimizer passes over parameters without a gradient
        if self._plugin_optimizer:
            self._step_plugin(self._plugin_optimizer)
        else:
            self._engine.step()
        if self._decay and math.isfinite(grad_norm):
            update_averages(self._partitions, self._base_optimizer, decay=self._decay)

    def _step_plugin(self, name: str) -> None:
        """Update the weights by a plugin's optimizer. Raises TrainingError if the optimizer has state that a checkpoint
        would lose."""
        before = group_values(self._base_optimizer)
        with plugin_errors(OPTIMIZERS, name, what="optimizer", kind=TrainingError):
            self._engine.step()
        after = group_values(self._base_optimizer)
        lost = unkept_state(self._partitions, self._base_optimizer) or _changed_value(before, after)
        if lost:
            raise raised_everywhere(
                TrainingError(
                    f"optim.name = {name!r}: {type(self._base_optimizer).__name__} keeps {lost}, which a checkpoint "
                    "does not store. In the state of each parameter, keep only fp32 tensors of the parameter's shape, "
                    "and state['step'], an fp32 tensor with one number that counts the updates."
                )
            )

    def _divide_gradients(self, divisor: float) -> None:
        """Set the number by which the next update divides the gradients. This number combines clipping
        and loss scale.

        On a GPU, or in bf16, torch's fused optimizers divide while they read the gradients, which saves a pass.
        """
        self._divisor = divisor
        if self._update_divides:
            if divisor == 1.0:
                scale = None
            else:
                scale = torch.full((), divisor, dtype=torch.float32, device=self._device)
            self._base_optimizer.grad_scale = scale
            self._factor = 1.0
        else:
            self._factor = 1.0 / divisor

    def _rescale(self, gradients: list[Tensor]) -> None:
        """Multiply gradients by the factor that `_divide_gradients` has set, unless the optimizer itself divides the
        gradients."""
        if self._factor != 1.0:
            torch._foreach_mul_(gradients, self._factor)

    def _step_masters(self) -> None:
        """Update the weights at stage 0 in half precision.

        This replaces DeepSpeed's own method, which waits for the device four more times per step.
        """
        optimizer = self._optimizer
        optimizer.overflow = not math.isfinite(self._given_norm)
        if optimizer.overflow:
            optimizer._skip_invalid_grad_norm()
            return
        optimizer._update_scale(False)
        pairs = [(master, parameter) for master, parameter in _masters(optimizer) if parameter.grad is not None]
        for master, parameter in pairs:
            master.grad = parameter.grad.to(master.dtype)
        self._rescale([master.grad for master, _ in pairs])
        self._base_optimizer.step()
        torch._foreach_copy_([parameter.data for _, parameter in pairs], [master.data for master, _ in pairs])
        for master, _ in pairs:
            master.grad = None

    def _step_partitions(self) -> None:
        """Update this rank's partitions by the kernel at stages 1 and 2, and gather the weights of all ranks.

        This replaces DeepSpeed's own method, which copies the gradients to a flat tensor in fp32, and then the weights.
        """
        from deepspeed.runtime.utils import all_gather_dp_groups

        optimizer = self._optimizer
        optimizer.overflow = not math.isfinite(self._given_norm)
        optimizer._update_scale(optimizer.overflow)
        if not optimizer.overflow:
            rank = torch.distributed.get_rank()
            for index, group in enumerate(self._base_optimizer.param_groups):
                gradients = optimizer.averaged_gradients[index]
                weights = optimizer.parallel_partitioned_bit16_groups[index][rank]
                update_group(self._base_optimizer, group, gradients, weights, divisor=self._divisor)
            all_gather_dp_groups(
                groups_flat=optimizer.bit16_groups_flat,
                partitioned_param_groups=optimizer.parallel_partitioned_bit16_groups,
                dp_process_group=optimizer.real_dp_process_group,
                start_alignment_factor=optimizer.nccl_start_alignment_factor,
                allgather_bucket_size=optimizer.allgather_bucket_size,
            )
        optimizer.zero_grad(set_to_none=True)
        optimizer._release_preflattened_grad_buffers()
        for index in optimizer.averaged_gradients:
            optimizer.averaged_gradients[index] = None
            optimizer.all_grad_tensors[index] = None

    def _parameters(self) -> list[Tensor]:
        """Return the parameter tensors that DeepSpeed trains. Some of them are flat tensors with many parameters of the
        model."""
        return [stored.tensor for stored in self.stored]

    def _scale(self) -> float:
        """Return the loss scale in fp16, or 1 in other precisions."""
        return float(getattr(self._optimizer, "loss_scale", 1.0))

    @override
    def losses(self, batch: Batch, memory: Memory, *, with_top1_correct: bool = False) -> tuple[Tensor, Memory]:
        return self._infer(batch, memory, None, False, with_top1_correct)

    @override
    def predict(self, batch: Batch, memory: Memory) -> tuple[Tensor, Memory]:
        return self._infer(batch, memory, None, True)

    def _infer(self, *arguments: Any) -> tuple[Tensor, Memory]:
        """Call the module without gradients or dropout, and return its result."""
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
    def partition_states(self) -> list[PartitionState]:
        return list(partition_states(self._partitions, self._base_optimizer, padded=self._padded))

    @override
    def fragments(self) -> list[Fragment]:
        return list(fragments(self.partition_states()))

    @override
    def loss_scale(self) -> dict[str, Any]:
        scaler = _loss_scaler(self._optimizer)
        return {name: getattr(scaler, name) for name in _SCALER_STATE if hasattr(scaler, name)}

    @override
    def load(self, source: Source, *, loss_scale: dict[str, Any]) -> None:
        with self._changing_weights():
            keeps = self._decay > 0
            run_on_all_ranks(
                lambda: fill(self._partitions, self._base_optimizer, source, with_average=keeps, padded=self._padded)
            )
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
        """Return a context manager for a block that changes the fp32 weights.

        After the block it copies these weights to the weights that the model computes with.
        """
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
        empty_engine(self._engine)
        vars(self._optimizer).clear()
        vars(self._base_optimizer).clear()
        self.stored = []
        self._partitions = []


_PREFIX = "model."
"""Prefix of parameter names in the trained module `SegmentLoss`, which wraps the model."""
_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of DeepSpeed's loss scaler that a checkpoint stores."""


def _sum_products_in_fp32() -> None:
    """Keep partial sums of matrix products in fp32. By default torch lets cuBLAS round them to half precision.

    The products of weight gradients sum over thousands of tokens in several parts.
    """
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False


def _build_model(config: Config, *, vocab_size: int, weights: dict[str, Tensor] | None) -> TransformerXL:
    """Build the model in host memory, with `weights` or with random weights, which are the same on every rank.

    At ZeRO stage 3 DeepSpeed later leaves each rank only its part of the weights.
    """
    torch.manual_seed(derive_seed(config.run.seed, "init"))
    model = TransformerXL(
        config.model,
        vocab_size=vocab_size,
        recompute_every=config.engine.recompute_every if config.engine.activation_checkpointing else 0,
        attention=config.engine.attention,
        memory_lens=config.train.memory_lens,
        keeps_scores=config.engine.keep_scores == "on",
    )
    if weights is not None:
        copy_weights(model, weights)
    return model


def _changed_value(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """Return the name of one value of the optimizer's parameter groups that differs between `before` and `after`, or an
    empty text."""
    for old, new in zip(before, after, strict=True):
        for key in new:
            if old.get(key) != new[key]:
                return f"group[{key!r}]"
    return ""


def _masters(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Yield pairs (fp32 weight, parameter in half precision that is made from it), at stage 0."""
    for masters, parameters in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        yield from zip(masters, parameters, strict=True)


def _loss_scaler(optimizer: Any) -> Any:
    """Return DeepSpeed's object that adapts the loss scale in fp16, or None in other precisions.

    DeepSpeed has different names for this object with ZeRO and at stage 0.
    """
    scaler = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
    is_dynamic = getattr(scaler, "dynamic", False) or getattr(scaler, "dynamic_loss_scale", False)
    if is_dynamic:
        return scaler
    return None


def _replace(optimizer: Any, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a method of DeepSpeed's optimizer, and return the original. Raises TrainingError if there is no such
    method."""
    original: Callable[..., Any] | None = getattr(optimizer, name, None)
    if original is None:
        raise TrainingError(
            f"DeepSpeed's {type(optimizer).__name__} has no method {name}, which the engine replaces. Install "
            f"the version of DeepSpeed that constraints.txt lists."
        )
    setattr(optimizer, name, method)
    return original


def _reduce_with_first(leaf_parameters: dict[nn.Module, list[nn.Parameter]], blocks: list[nn.Module]) -> None:
    """Make DeepSpeed exchange gradients of shared parameters after the backward pass of the first block, at stage 3.

    The gradients of a block are exchanged by a hook after its backward pass. DeepSpeed puts parameters that blocks
    share into the list of the last block, whose pass ends first. Their gradients are complete only after the first
    block, so they would be exchanged too early, and lost. This function moves these parameters to the list of the first
    block. The hooks read the lists when they run, so they use the changed lists.
    """
    shared = {id(parameter) for parameter in blocks[0].parameters()}
    late = [parameter for block in blocks[1:] for parameter in leaf_parameters[block] if id(parameter) in shared]
    for block in blocks[1:]:
        leaf_parameters[block][:] = [parameter for parameter in leaf_parameters[block] if id(parameter) not in shared]
    leaf_parameters[blocks[0]].extend(late)
    for parameter in late:
        parameter.ds_z3_leaf_module = blocks[0]  # type: ignore[attr-defined]


def norm_over_ranks(parts: list[Tensor]) -> Tensor:
    """Return the norm, in fp32, of values that are spread over the ranks. Each value is on exactly one rank. Padding
    must be 0.

    The computation takes one reduction. It does not wait for the device, and allocates nothing of the size of a
    gradient. A norm above 1.8e19 becomes infinite.
    """
    return all_reduce_sum(norms_of(parts).square().sum()).sqrt()


def _joined_norm(norms: list[Tensor]) -> Tensor:
    """Return the norm over all groups of parameters. It is infinite if DeepSpeed wrote -1 as the norm of one group."""
    stacked = torch.stack(norms)
    return torch.where((stacked < 0).any(), torch.inf, torch.linalg.vector_norm(stacked))


def import_deepspeed() -> Any:
    """Import DeepSpeed on first use, for the right accelerator and with a quiet log. The import takes seconds."""
    if not uses_gpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # DeepSpeed would start a program in every step to count the node's ranks, unless a launcher names the number.
        on_one_node = os.environ.get("WORLD_SIZE", "1")
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", on_one_node))
    import deepspeed
    from deepspeed.utils import logger as deepspeed_logger
    from deepspeed.utils import nvtx

    nvtx.enable_nvtx = False  # a range around each of a thousand calls per step

    # Disable its extensions, which are probed by compilers and on GPUs when one is first asked for. Only one ever is,
    # for inference on CPUs. It compiles for half a minute at the first start, and its 67 MB of shared memory per rank
    # outlive a killed job. Over several machines it waits without end.
    deepspeed.ops.__compatible_ops__ = {}

    deepspeed_logger.setLevel(logging.WARNING)
    # The optimizers that it does not know are tested here.
    deepspeed_logger.addFilter(lambda record: "untested optimizer" not in record.getMessage())
    # DeepSpeed still calls collectives by names that the newest torch renames; users can do nothing about it.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    return deepspeed
