"""The engine: forward, backward, gradient exchange and update. The only file besides `checkpoint` that knows DeepSpeed.

The loop speaks to the `Engine` protocol. `ZeroEngine` fulfils it with DeepSpeed's ZeRO stages 0 to 3. What DeepSpeed
would do in secret is either set explicitly in `deepspeed_config` or done here: the learning rate is set by the loop,
gradients are averaged over micro-batches and ranks by DeepSpeed, and clipped by it except at stage 0 in fp32.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from txl_dist.config import BatchPlan, Config
from txl_dist.dist import Ranks, limit_waiting, uses_gpu
from txl_dist.errors import CheckpointError
from txl_dist.infer.bundle import copy_weights
from txl_dist.model.memory import Memory
from txl_dist.model.transformer_xl import Batch, SegmentLoss, TransformerXL
from txl_dist.rng import derive_seed
from txl_dist.train.extension import prepare_compilation
from txl_dist.train.optim import apply_settings, build_optimizer


class Engine(Protocol):
    """What the loop needs of an engine. Every method is called by all ranks together."""

    @property
    def model(self) -> TransformerXL:
        """The network; its parameters may be sharded, so only its settings and shapes are for reading."""

    @property
    def skipped_steps(self) -> int:
        """Updates skipped because a gradient overflowed."""

    def micro_step(self, batch: Batch, memory: Memory, *, normalizer: Tensor | float) -> tuple[Tensor, Memory]:
        """Forward and backward of one micro-batch. Returns (its loss, detached; the memory after it)."""

    def step(self, *, lr: float) -> Tensor | float:
        """Update with the accumulated gradients. Returns their global norm before clipping, or 0.0 if not known."""

    def losses(self, batch: Batch, memory: Memory) -> tuple[Tensor, Memory]:
        """nll_BT in nats and the next memory, without gradients or dropout."""

    def empty_memory(self, *, num_lanes: int, memory_len: int) -> Memory:
        """A memory that holds nothing, in the compute type, on the device."""

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state of all ranks into `folder`."""

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote on as many ranks with the same stage. Raises CheckpointError."""


def deepspeed_config(config: Config, *, plan: BatchPlan) -> dict[str, Any]:
    """The DeepSpeed dictionary, derived from ours; a pure function, so that nobody writes DeepSpeed's JSON.

    DeepSpeed silently ignores misspelt top-level keys; a test holds the keys of this function to those it reads.
    """
    engine, precision = config.engine, config.engine.precision
    zero: dict[str, Any] = {"stage": engine.zero_stage}
    if engine.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if engine.offload_parameters:
        zero["offload_param"] = {"device": "cpu"}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.microbatch_lanes,
        "gradient_accumulation_steps": plan.num_microbatches,
        "gradient_clipping": 0.0 if clips_itself(config) else config.optim.clip_norm,
        "zero_optimization": zero,
        # Ours are torch's fused optimizers; without this DeepSpeed insists on compiling its CPU Adam for offload.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    if precision == "bf16":
        # The overflow check is an extra pass and a host sync per step, and bf16 does not overflow where fp32 would not.
        settings["bf16"] = {"enabled": True, "check_grad_overflow": False}
        # bf16 would lose the small gradients of many micro-batches. Stage 0 cannot do otherwise; stage 1 would switch
        # to an optimizer whose checkpoints cannot be consolidated.
        if engine.zero_stage >= 2:
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if precision == "fp16":
        settings["fp16"] = {"enabled": True}
    return settings


def clips_itself(config: Config) -> bool:
    """Whether our engine clips gradients: at stage 0 in fp32 DeepSpeed would clip but not tell the norm."""
    return config.engine.zero_stage == 0 and config.engine.precision == "fp32"


class ZeroEngine:
    """`Engine` by DeepSpeed ZeRO."""

    def __init__(
        self,
        config: Config,
        *,
        vocab_size: int,
        plan: BatchPlan,
        ranks: Ranks,
        weights: dict[str, Tensor] | None = None,
    ) -> None:
        """`weights` to begin with, the same on every rank; None draws them."""
        deepspeed = import_deepspeed()
        # Every rank draws the same weights; at stage 3 each keeps its part of them.
        torch.manual_seed(derive_seed(config.run.seed, "init"))
        model = TransformerXL(
            config.model, vocab_size=vocab_size, recompute_blocks=config.engine.activation_checkpointing
        )
        if weights is not None:
            copy_weights(model, weights)
        module = SegmentLoss(model).to(ranks.device)
        if ranks.device.type == "cpu":
            prepare_compilation()
        self._clips_itself = clips_itself(config)
        self._clip_norm = config.optim.clip_norm
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=module,
            optimizer=build_optimizer(module, config.optim),
            config=deepspeed_config(config, plan=plan),
        )
        limit_waiting(timeout_s=config.engine.timeout_s)
        self._engine.checkpoint_engine = _safe_checkpoint_engine(self._engine.checkpoint_engine)
        self._model, self._optim = model, config.optim

    @property
    def model(self) -> TransformerXL:
        """See `Engine`."""
        return self._model

    @property
    def skipped_steps(self) -> int:
        """See `Engine`."""
        return int(self._engine.skipped_steps)

    def micro_step(self, batch: Batch, memory: Memory, *, normalizer: Tensor | float) -> tuple[Tensor, Memory]:
        """See `Engine`."""
        loss, memory = self._engine(batch, memory, normalizer)
        self._engine.backward(loss)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()  # DeepSpeed counts micro-batches here; the update itself is `step`'s
        return loss.detach(), memory

    def step(self, *, lr: float) -> Tensor | float:
        """See `Engine`."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if self._clips_itself:
            parameters = list(self._engine.module.parameters())
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            if self._clip_norm:
                torch.nn.utils.clip_grads_with_norm_(parameters, self._clip_norm, norm)
        self._engine.step()
        known = norm if self._clips_itself else self._engine.get_global_grad_norm()
        return 0.0 if known is None else known

    def losses(self, batch: Batch, memory: Memory) -> tuple[Tensor, Memory]:
        """See `Engine`."""
        self._engine.module.eval()
        try:
            with torch.no_grad():
                nll_BT, memory = self._engine.module(batch, memory)
        finally:
            self._engine.module.train()
        return nll_BT, memory

    def empty_memory(self, *, num_lanes: int, memory_len: int) -> Memory:
        """See `Engine`."""
        return self._model.empty_memory(num_lanes=num_lanes, memory_len=memory_len)

    def save(self, folder: Path) -> None:
        """See `Engine`."""
        try:
            self._engine.save_checkpoint(str(folder.parent), tag=folder.name, save_latest=False)
        except (OSError, RuntimeError) as error:  # torch.save on a full disk is a RuntimeError
            raise CheckpointError(f"cannot write {folder}: {error}. Free space or mend permissions.") from error
        if torch.distributed.get_rank() == 0:
            for script in ("zero_to_fp32.py", "zero_to_torch.py"):  # dropped beside the folder by DeepSpeed
                (folder.parent / script).unlink(missing_ok=True)

    def load(self, folder: Path) -> None:
        """See `Engine`."""
        with trusted_globals():
            found, _ = self._engine.load_checkpoint(str(folder.parent), tag=folder.name, load_lr_scheduler_states=False)
        if found is None:
            raise CheckpointError(f"{folder} holds no DeepSpeed state. Resume from another checkpoint.")
        # DeepSpeed restores the settings that were saved; those of this run are to hold.
        apply_settings(self._optimizer.param_groups, self._optim)


@contextmanager
def trusted_globals() -> Iterator[None]:
    """Within, the few DeepSpeed classes in its checkpoint files may be unpickled; any other class is refused."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    def stage_by_name(enum: Any, name: str) -> Any:
        """In place of `getattr`, by which Python 3.11 before 3.11.4 pickles a member of an enum."""
        if enum is not ZeroStageEnum:
            raise CheckpointError("a DeepSpeed file asks for an attribute of something. Use another checkpoint.")
        return ZeroStageEnum[name]

    classes: list[Any] = [ZeroStageEnum, fragment_address, LossScaler, DynamicLossScaler]
    with torch.serialization.safe_globals([*classes, (stage_by_name, "builtins.getattr")]):
        yield


def _safe_checkpoint_engine(engine: Any) -> Any:
    """DeepSpeed's own file engine, but loading with weights_only: a crafted checkpoint cannot run code."""

    def load(path: str, map_location: Any = None) -> Any:
        return torch.load(path, map_location=map_location, weights_only=True)

    engine.load = load
    return engine


def import_deepspeed() -> Any:
    """Import on first use (it takes seconds), on the right accelerator and without its chatter."""
    if not uses_gpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.utils import logger as deepspeed_logger

    deepspeed_logger.setLevel(logging.WARNING)
    # DeepSpeed still calls collectives by names that the newest torch renames; users can do nothing about it.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    return deepspeed
