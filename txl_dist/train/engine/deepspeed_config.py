"""DeepSpeed's settings, derived from the settings of a run. Users never write DeepSpeed's JSON."""

from __future__ import annotations

from typing import Any

from txl_dist.config.load import BatchPlan
from txl_dist.config.schema import EngineSection

BUCKET_LEN = 1 << 25
"""Number of gradient values that are exchanged at once during the backward pass. It is also the number of weights that
are gathered at once."""
PERSISTENT_LEN = 1 << 14
"""Maximum number of values of a parameter that every rank keeps whole at ZeRO stage 3.

Biases and norms are this small. To gather them for each pass would cost more than to keep them.
"""


def deepspeed_config(engine: EngineSection, *, plan: BatchPlan, block_len: int, on_gpu: bool) -> dict[str, Any]:
    """Return DeepSpeed's configuration dictionary, as a pure function of the settings.

    `block_len` is the number of parameter values in one block of the model. DeepSpeed silently ignores misspelt
    top-level keys. So a test compares the keys here with the keys that DeepSpeed reads.
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
            # DeepSpeed would replace torch's linear function in the whole process by a slower one.
            "memory_efficient_linear": False,
            # A block is released right after its use, and at most the next one is gathered meanwhile. DeepSpeed's
            # defaults keep all weights of models up to 1e9 parameters gathered, from the second step on.
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
        # DeepSpeed's timer would wait for the device at both ends of every micro-batch.
        "timers": {"throughput": {"enabled": False}},
        # The optimizers are torch's fused ones. Without this DeepSpeed would compile its CPU Adam for offload.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    if precision == "bf16":
        # `ZeroEngine.step` checks the norm. Without this stages 1 and 2 would update even if the norm is not finite.
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
        # Sums in bf16 lose the small gradients of many micro-batches. Stage 0 supports nothing else. Stage 1 would
        # switch to an optimizer whose checkpoints cannot be consolidated.
        if engine.zero_stage >= 2:
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if precision == "fp16":
        settings["fp16"] = {"enabled": True}
    return settings
