"""The DeepSpeed dictionary has the values of our settings, under keys that DeepSpeed really reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from txl_dist.config.load import Config, config_from_dict, plan_batch
from txl_dist.distributed.collectives import RankInfo
from txl_dist.errors import ConfigError
from txl_dist.model.attention import implementation
from txl_dist.model.fused_attention import fused_relative_attention
from txl_dist.model.kernels import attention_launch, rows
from txl_dist.model.relative_attention import Terms
from txl_dist.train import preflight
from txl_dist.train.engine import zero
from txl_dist.train.engine.deepspeed_config import BUCKET_LEN, PERSISTENT_LEN, deepspeed_config
from txl_dist.train.engine.zero import import_deepspeed
from txl_dist.train.preflight import check_hardware, describe_batch


def settings_of(*, world_size: int = 2, on_gpu: bool = False, **sections: dict[str, Any]) -> dict[str, Any]:
    values = {"train": {"num_lanes": 32, "microbatch_lanes": 4}, **sections}
    config = config_from_dict(values, source="test")
    plan = plan_batch(config.train, world_size=world_size)
    return deepspeed_config(config.engine, plan=plan, block_len=5000, on_gpu=on_gpu)


def each_engine() -> Iterator[dict[str, Any]]:
    for precision in ("fp32", "bf16", "fp16"):
        for stage in (0, 1, 2, 3):
            yield {"zero_stage": stage, "precision": precision}
            if stage >= 1:
                yield {"zero_stage": stage, "precision": precision, "offload_optimizer": True}
            if stage == 3:
                yield {
                    "zero_stage": stage,
                    "precision": precision,
                    "offload_optimizer": True,
                    "offload_parameters": True,
                }


class Recording(dict[str, Any]):
    """A dictionary that knows which of its keys were asked for."""

    asked: set[str]

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.asked = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __copy__(self) -> Recording:
        copy = Recording(self)
        copy.asked = self.asked
        return copy


def test_the_batch_is_that_of_the_plan() -> None:
    settings = settings_of(world_size=2)
    assert settings["train_micro_batch_size_per_gpu"] == 4
    assert settings["gradient_accumulation_steps"] == 4


@pytest.mark.parametrize("engine", list(each_engine()), ids=str)
def test_stage_precision_and_offload_are_said_and_nothing_else(engine: dict[str, Any]) -> None:
    settings = settings_of(engine=engine, optim={"clip_norm": 0.75})
    assert settings["gradient_clipping"] == 0.0, "the engine clips"
    zero: dict[str, Any] = {
        "stage": engine["zero_stage"],
        "reduce_bucket_size": BUCKET_LEN,
        "allgather_bucket_size": BUCKET_LEN,
        "overlap_comm": False,
    }
    if engine["zero_stage"] == 3:
        zero |= {
            "memory_efficient_linear": False,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": 5000,
            "stage3_prefetch_bucket_size": 5000,
            "stage3_param_persistence_threshold": PERSISTENT_LEN,
        }
    if engine.get("offload_optimizer"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if engine.get("offload_parameters"):
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    assert settings["zero_optimization"] == zero
    assert ("bf16" in settings) is (engine["precision"] == "bf16")
    assert ("fp16" in settings) is (engine["precision"] == "fp16")
    if engine["precision"] != "fp32":
        assert settings[engine["precision"]]["enabled"] is True
    assert "optimizer" not in settings, "the optimizer is ours"
    assert "scheduler" not in settings, "the learning rate is set by the loop"


def test_the_exchange_overlaps_with_the_backward_pass_where_several_gpus_have_something_to_exchange() -> None:
    overlaps = {
        (world_size, on_gpu): settings_of(world_size=world_size, on_gpu=on_gpu)["zero_optimization"]["overlap_comm"]
        for world_size in (1, 2)
        for on_gpu in (False, True)
    }
    assert [key for key, overlap in overlaps.items() if overlap] == [(2, True)]


def test_the_dictionary_is_a_pure_function() -> None:
    assert settings_of() == settings_of()
    settings_of()["zero_optimization"]["stage"] = 3
    assert settings_of()["zero_optimization"]["stage"] == Config().engine.zero_stage


def test_deepspeed_reads_every_key_and_understands_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    for engine in each_engine():
        settings = Recording(settings_of(world_size=1, engine=engine))
        read = DeepSpeedConfig(settings)
        # DeepSpeed ignores unknown keys at the top; below it refuses them itself.
        assert settings.keys() - settings.asked == set(), engine
        assert (read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (4, 8)
        assert read.gradient_clipping == 0.0
        assert read.zero_config.stage == engine["zero_stage"]
        assert read.bfloat16_config.enabled is (engine["precision"] == "bf16")
        assert read.float16_config.enabled is (engine["precision"] == "fp16")
        assert (read.zero_config.offload_optimizer is not None) is engine.get("offload_optimizer", False)
        assert (read.zero_config.offload_param is not None) is engine.get("offload_parameters", False)
        assert read.zero_allow_untested_optimizer is True
        assert read.zero_force_ds_cpu_optimizer is False
    misspelt = Recording({**settings_of(world_size=1), "gradient_cliping": 1.0})
    DeepSpeedConfig(misspelt)
    assert misspelt.keys() - misspelt.asked == {"gradient_cliping"}, "this test would see a misspelt key"


def test_fp16_is_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match=r"engine\.precision=fp16 needs a GPU"):
        check_hardware(config_from_dict({"engine": {"precision": "fp16"}}, source="test"), device=torch.device("cpu"))
    for precision, device in (("fp32", "cpu"), ("bf16", "cpu"), ("fp16", "cuda")):
        config = config_from_dict({"engine": {"precision": precision}}, source="test")
        check_hardware(config, device=torch.device(device))


def test_tf32_is_fp32_on_gpus_that_have_it_and_refused_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    config, cuda = config_from_dict({"engine": {"precision": "tf32"}}, source="test"), torch.device("cuda")
    assert config.engine.dtype == "fp32"
    assert settings_of(engine={"precision": "tf32"}) == settings_of(engine={"precision": "fp32"})
    refusal = r"engine\.precision=tf32 needs a GPU of compute capability 8\.0"
    with pytest.raises(ConfigError, match=refusal):
        check_hardware(config, device=torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match=refusal):
        check_hardware(config, device=cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    check_hardware(config, device=cuda)


def test_offloaded_numbers_lie_in_pinned_memory_where_a_gpu_copies_them() -> None:
    offload = {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True}
    for on_gpu in (False, True):
        zero = settings_of(engine=offload, on_gpu=on_gpu)["zero_optimization"]
        assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu", "pin_memory": on_gpu}


def test_a_driver_that_torch_cannot_use_is_refused_unless_the_cpu_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, config = torch.device("cpu"), Config()
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(preflight, "drivers_of_gpus", lambda: ["470.57"] * 2, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"lists 2 GPUs \(driver 470\.57\).*CUDA 13\.0"):
        check_hardware(config, device=cpu)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    check_hardware(config, device=cpu)
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setattr(torch.version, "cuda", None)
    check_hardware(config, device=cpu)


def test_attention_on_a_gpu_without_a_compiler_goes_without_triton_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(attention_launch, "_has_triton", lambda: True)
    monkeypatch.setattr(attention_launch, "missing_compiler_reason", lambda: "Triton needs Python.h")
    config = config_from_dict({"engine": {"precision": "bf16"}}, source="test")
    job = Mock(config=config, plan=plan_batch(config.train, world_size=1), vocab_size=100)
    assert [line for line in describe_batch(job, num_parameters=869_732) if "Python.h" in line] == [
        "model: 869,732 parameters, vocabulary 100, memory 128 tokens; ZeRO-1, bf16, "
        "attention fused (not by Triton: Triton needs Python.h)"
    ]
    monkeypatch.setattr(preflight, "uses_gpu", lambda: True)
    monkeypatch.setattr(preflight, "_attention", lambda config: "triton")
    for choice, ends in (("auto", "triton, CUDA graphs"), ("off", "triton")):
        job.config = config_from_dict({"engine": {"cuda_graph": choice}}, source="test")
        assert list(describe_batch(job, num_parameters=869_732))[1].endswith(f"attention {ends}")
    terms = Terms(*(torch.zeros(1, 2, 3, 4) for _ in range(3)), torch.zeros(2, 3, 4))
    assert implementation("auto", terms) is fused_relative_attention


def test_attention_on_a_gpu_where_triton_fails_goes_without_triton_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    monkeypatch.setattr(attention_launch, "_has_triton", lambda: True)
    monkeypatch.setattr(attention_launch, "missing_compiler_reason", lambda: "")
    monkeypatch.setattr(attention_launch, "failed_kernel_reason", lambda device: "a small kernel failed")
    config = config_from_dict({"engine": {"precision": "bf16"}}, source="test")
    job = Mock(config=config, plan=plan_batch(config.train, world_size=1), vocab_size=100)
    (line,) = (line for line in describe_batch(job, num_parameters=869_732) if "attention" in line)
    assert line.endswith("attention fused (not by Triton: a small kernel failed)")
    query = torch.zeros(1, 2, 3, 4, dtype=torch.bfloat16)
    terms = Terms(query, query, query, query[0])
    assert implementation("auto", terms) is fused_relative_attention
    assert not rows.runs("auto", query)
    config = config_from_dict({"engine": {"precision": "bf16", "attention": "triton"}}, source="test")
    with pytest.raises(ConfigError, match=r"engine\.attention=triton cannot run: a small kernel failed\. Use"):
        check_hardware(config, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"positions": "absolute"}, "by torch (no Triton kernels: a small kernel failed)"),
        ({"any_order": True}, "fused (not by Triton: a small kernel failed)"),
    ],
)
def test_models_whose_attention_needs_no_triton_say_too_that_their_other_kernels_cannot_run(
    model: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(preflight, "unsupported_device_reason", lambda query: "a small kernel failed")
    config = Mock(model=Config().model.model_copy(update=model), engine=Config().engine)
    assert preflight._attention(config) == said


def test_triton_for_a_model_of_any_order_is_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Config().engine.model_copy(update={"precision": "bf16", "attention": "triton"})
    config = Mock(model=Config().model.model_copy(update={"any_order": True}), engine=engine)
    with pytest.raises(ConfigError, match=r"engine\.attention=triton cannot run: the kernels compute causal"):
        check_hardware(config, device=torch.device("cpu"))


def test_a_model_of_any_order_goes_without_triton_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for module in (attention_launch, preflight):
        monkeypatch.setattr(module, "unsupported_device_reason", lambda query: None)
    lines = []
    for any_order, choice in ((False, "off"), (True, "on"), (False, "on")):
        settings = {"engine": {"precision": "bf16", "keep_scores": choice}, "model": {"any_order": any_order}}
        config = config_from_dict(settings, source="test")
        job = Mock(config=config, plan=plan_batch(config.train, world_size=1), vocab_size=100)
        lines += [line for line in describe_batch(job, num_parameters=869_732) if "attention" in line]
    assert lines[0].endswith("attention triton")
    assert "attention fused (not by Triton: the kernels compute causal attention only" in lines[1]
    assert lines[2].endswith("attention triton with kept scores")


def test_no_extension_of_deepspeeds_is_probed_or_used(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = import_deepspeed().ops
    probe = Mock(return_value=True)
    monkeypatch.setattr(ops.op_builder.builder, "probe_is_compatible", probe)
    monkeypatch.delitem(vars(ops), "__compatible_ops__", raising=False)
    import_deepspeed()
    assert not ops.__compatible_ops__.get("deepspeed_shm_comm", False)
    assert probe.call_count == 0


def test_products_in_half_precision_are_summed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul, config = torch.backends.cuda.matmul, Config()
    monkeypatch.setattr(zero, "_build_model", Mock(side_effect=ConfigError("no model")))
    ranks = RankInfo(0, 1, 0, torch.device("cpu"), 1)
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    try:
        matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True
        with pytest.raises(ConfigError, match="no model"):
            zero.ZeroEngine(config, vocab_size=100, plan=plan_batch(config.train, world_size=1), ranks=ranks)
        assert not matmul.allow_bf16_reduced_precision_reduction
        assert not matmul.allow_fp16_reduced_precision_reduction
    finally:
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before
