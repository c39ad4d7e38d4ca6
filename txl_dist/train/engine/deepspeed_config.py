"""The settings that DeepSpeed gets, derived from ours; nobody writes its JSON."""

from __future__ import annotations

from typing import Any

from txl_dist.config.load import BatchPlan
from txl_dist.config.schema import EngineSection

BUCKET_LEN = 1 << 25
"""Gradients that are exchanged at once, while the backward pass goes on, and weights that are gathered at once."""
PERSISTENT_LEN = 1 << 14
"""Parameters as small as biases and norms are not worth gathering: at stage 3 every rank keeps them."""


def deepspeed_config(engine: EngineSection, *, plan: BatchPlan, block_len: int, on_gpu: bool) -> dict[str, Any]:
    """The DeepSpeed dictionary, derived from ours; a pure function, so that nobody writes DeepSpeed's JSON.

    `block_len` is how many parameters a block of the model has.

    DeepSpeed silently ignores misspelt top-level keys; a test holds the keys of this function to those it reads.
    """
    precision = engine.precision
    # On a CPU there is no stream to overlap on; a rank alone has nothing to exchange.
    overlaps = on_gpu and plan.world_size > 1
    zero: dict[str, Any] = {
        "stage": engine.zero_stage,
        # DeepSpeed's 5e8 would be 2 GB of buffers on every rank.
        "reduce_bucket_size": BUCKET_LEN,
        "allgather_bucket_size": BUCKET_LEN,
        "overlap_comm": overlaps,
    }
    if engine.zero_stage == 3:
        zero |= {
            # It would replace torch's linear function in the whole process by one that is slower.
            "memory_efficient_linear": False,
            # A block is let go as soon as it was used, and at most the next one gathered meanwhile. DeepSpeed's own
            # values keep models of up to 1e9 parameters gathered whole, from the second step on.
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": (2 if overlaps else 1) * block_len,
            "stage3_prefetch_bucket_size": block_len,
            "stage3_param_persistence_threshold": PERSISTENT_LEN,
        }
    host = {"device": "cpu", "pin_memory": on_gpu}  # a copy from pageable memory would wait for the device
    if engine.offload_optimizer:
        zero["offload_optimizer"] = host
    if engine.offload_parameters:
        zero["offload_param"] = host
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.microbatch_lanes,
        "gradient_accumulation_steps": plan.num_microbatches,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        # It would wait for the device at both ends of every micro-batch.
        "timers": {"throughput": {"enabled": False}},
        # Ours are torch's fused optimizers; without this DeepSpeed insists on compiling its CPU Adam for offload.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    if precision == "bf16":
        # The check itself is ours (`step`); without this stages 1 and 2 would update with whatever norm they are given.
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
        # bf16 would lose the small gradients of many micro-batches. Stage 0 cannot do otherwise; stage 1 would switch
        # to an optimizer whose checkpoints cannot be consolidated.
        if engine.zero_stage >= 2:
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if precision == "fp16":
        settings["fp16"] = {"enabled": True}
    return settings
