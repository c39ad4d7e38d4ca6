"""Predicted memory compared with measured memory of a micro-step in a separate process, and with exact arithmetic."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers.tiny import tiny_config
from txl_dist.config.load import Config, changed, plan_batch
from txl_dist.data.loader.stream import plain_segment
from txl_dist.model import fused_softmax
from txl_dist.model.flops import count_parameters
from txl_dist.model.transformer_xl import SegmentLoss, TransformerXL
from txl_dist.train.batch import batch_maker
from txl_dist.train.engine.deepspeed_config import BUCKET_LEN
from txl_dist.train.engine.muon import is_matrix
from txl_dist.train.footprint import step as footprint_step
from txl_dist.train.footprint.rank import bytes_per_rank
from txl_dist.train.footprint.step import MicroStep
from txl_dist.vocabulary_clusters import cluster_edges, cluster_shares

VOCAB_SIZE = 6000
LAYERS = {"num_layers": 4, "width": 256, "num_heads": 4, "head_width": 64, "ff_width": 1024, "dropout": 0.1}
TRAIN = {"num_lanes": 4, "segment_len": 128, "memory_len": 128, "microbatch_lanes": 4}
MODELS: dict[str, dict[str, Any]] = {
    "two layers of clusters": {"model": LAYERS | {"cutoffs": [2000, 4000], "div_value": 2}, "train": TRAIN},
    "longer, memories of their own, blocks recomputed": {
        "model": LAYERS | {"cutoffs": [], "div_value": 1, "tie_projections": [], "attention_dropout": 0.1},
        "train": TRAIN | {"segment_len": 512, "memory_len": 256, "memory_lens": [256, 16, 128, 256]},
        "engine": {"activation_checkpointing": True},
    },
}


def held(config: Config, *, world_size: int = 1, on_gpu: bool = False) -> dict[str, float]:
    plan = plan_batch(config.train, world_size=world_size)
    return bytes_per_rank(config, plan=plan, vocab_size=300, on_gpu=on_gpu)


def measure(name: str) -> None:
    """In a process of its own: print (bytes that the resident set grew by in micro-steps, bytes predicted)."""
    torch.set_num_threads(1)
    config = tiny_config(**MODELS[name])
    train = config.train
    ids = np.random.default_rng(1).integers(0, VOCAB_SIZE, (train.num_lanes, train.segment_len + 1)) ** 2 // VOCAB_SIZE
    model = TransformerXL(
        config.model,
        vocab_size=VOCAB_SIZE,
        recompute_every=int(config.engine.activation_checkpointing),
        memory_lens=train.memory_lens,
    ).train()
    loss_of, memory = SegmentLoss(model), model.empty_memory(num_lanes=train.num_lanes, memory_len=train.memory_len)
    memory = memory._replace(hidden=tuple(hidden_BMD.normal_() for hidden_BMD in memory.hidden))
    batch = batch_maker(model, mask_documents=False).batch(plain_segment(ids))
    square = torch.ones(1024, 1024, requires_grad=True)
    (square @ square).sum().backward()  # buffers of the libraries are no part of it
    del square
    shares = cluster_shares(
        np.bincount(ids.flatten(), minlength=VOCAB_SIZE), cluster_edges(config.model.cutoffs, vocab_size=VOCAB_SIZE)
    )
    trace = footprint_step.follow(
        MicroStep(
            model=config.model,
            vocab_size=VOCAB_SIZE,
            cluster_shares=shares,
            lanes=train.num_lanes,
            segment_len=train.segment_len,
            memory_len=train.memory_len,
            memory_lens=train.memory_lens,
            dtype=torch.float32,
            attention="fused",
            recompute_every=int(config.engine.activation_checkpointing),
            is_flat=False,
            on_gpu=False,
        )
    )
    predicted = footprint_step.replay(trace, exchange="stays").alive
    before = kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        loss, _ = loss_of(batch, memory, 1.0)
        loss.backward()
    print(json.dumps([(kib("VmHWM") - before) * 1024, predicted]))


def kib(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return int(found[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_bytes_of_a_micro_step_are_foreseen_within_a_tenth(name: str) -> None:
    program = f"from tests.unit.train.footprint.test_footprint import measure; measure({name!r})"
    # Each tensor apart: what the C library keeps of freed pieces is its own affair.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    result = subprocess.run(
        command, cwd=Path(__file__).parents[4], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    measured, predicted = json.loads(result.stdout.splitlines()[-1])
    assert measured > 50 * 2**20
    assert 0.9 < predicted / measured < 1.1, (predicted / 2**20, measured / 2**20)


def test_each_stage_shards_what_it_shards() -> None:
    parameters = count_parameters(tiny_config().model, vocab_size=300)
    at = {stage: held(tiny_config(engine={"zero_stage": stage}), world_size=2) for stage in range(4)}
    assert [at[stage]["weights"] / parameters for stage in range(4)] == [4, 4, 4, 2]
    assert [at[stage]["gradients"] / parameters for stage in range(4)] == [4, 4, 2, 2]
    assert [at[stage]["optimizer"] / parameters for stage in range(4)] == [8, 6, 6, 6]
    assert at[0]["buckets"] == 0.0
    assert at[1]["buckets"] > 0.0
    assert held(tiny_config(engine={"zero_stage": 1}))["buckets"] == 0.0, "one rank exchanges nothing"


def test_muon_keeps_one_moment_of_matrices_and_what_it_makes_of_them_is_counted() -> None:
    config = tiny_config()
    with torch.device("meta"):
        model = TransformerXL(config.model, vocab_size=300)
    matrices = sum(p.numel() for name, p in model.named_parameters() if is_matrix(name, p.shape))
    assert 0 < matrices < count_parameters(config.model, vocab_size=300)
    for stage, share in ((0, 1), (1, 2), (3, 2)):
        muon, adamw = (
            held(tiny_config(engine={"zero_stage": stage}, optim={"name": name}), world_size=2)
            for name in ("muon", "adamw")
        )
        assert adamw["optimizer"] - muon["optimizer"] == 4 * matrices / share
        assert muon["activations"] >= adamw["activations"]


def test_an_average_of_the_weights_is_as_large_as_they_are_and_spread_as_the_moments() -> None:
    parameters = count_parameters(tiny_config().model, vocab_size=300)
    for stage, share in ((0, 1), (1, 2), (3, 2)):
        with_average, without = (
            held(tiny_config(engine={"zero_stage": stage}, optim={"ema_decay": ema}), world_size=2)
            for ema in (0.9, 0.0)
        )
        more = with_average["optimizer"] - without["optimizer"]
        assert more == with_average["checkpoint copy"] - without["checkpoint copy"] == 4 * parameters / share


def test_the_copy_of_a_checkpoint_is_foreseen_where_one_is_made() -> None:
    parameters = count_parameters(tiny_config().model, vocab_size=300)
    with_copy = held(tiny_config(engine={"zero_stage": 2}), world_size=2)
    assert 6 * parameters <= with_copy["checkpoint copy"] <= 6 * parameters + with_copy["memories"]
    assert held(tiny_config(engine={"zero_stage": 0}))["checkpoint copy"] > 12 * parameters  # weights and two moments
    assert "checkpoint copy" not in held(tiny_config(checkpoint={"asynchronous": False}))
    assert "checkpoint copy" not in held(tiny_config(), on_gpu=True)


def test_the_copy_of_the_memories_for_recovery_is_on_a_gpu_alone() -> None:
    recovered = tiny_config(recover={"spares": 1})
    assert held(recovered) == held(tiny_config())
    without, with_copy = (held(config, world_size=2, on_gpu=True) for config in (tiny_config(), recovered))
    assert with_copy.pop("recovery copy") == 2 * 2 * 12 * 32 * 4  # lanes * layers * positions * width * fp32
    assert with_copy == without


def test_accumulated_gradients_and_an_exchange_by_buckets_are_foreseen() -> None:
    def fullest(stage: int, microbatch_lanes: int) -> float:
        train = {"num_lanes": 4, "microbatch_lanes": microbatch_lanes, "memory_len": 0}
        return sum(held(tiny_config(train=train, engine={"zero_stage": stage}), on_gpu=True).values())

    parameters = count_parameters(tiny_config().model, vocab_size=300)
    assert fullest(0, 2) > fullest(0, 4) - 4 * parameters  # half the activations, but gradients are there before
    assert fullest(2, 4) > fullest(0, 4)  # masters, and two buckets of a fixed length


def test_the_padding_of_odd_widths_counts_on_a_gpu_alone() -> None:
    odd = tiny_config(model={"width": 20, "head_width": 5, "ff_width": 18})
    parameters = count_parameters(odd.model, vocab_size=300)
    assert held(odd)["weights"] == 4 * parameters
    assert held(changed(odd, {"engine.pad_widths": "off"}), on_gpu=True)["weights"] == 4 * parameters
    padded = held(odd, on_gpu=True)
    assert padded["weights"] > 4 * parameters
    assert padded["memories"] == held(odd)["memories"] * 32 / 20


def test_a_save_of_padded_widths_holds_copies_without_the_padding() -> None:
    """A micro-batch of one token needs less memory than these copies."""
    short = {"num_lanes": 1, "microbatch_lanes": 1, "segment_len": 1, "memory_len": 0}
    model = {"width": 100, "head_width": 12, "ff_width": 100, "cutoffs": [], "div_value": 1, "tie_projections": []}
    config = tiny_config(model=model, train=short, engine={"precision": "bf16", "zero_stage": 1})
    padded, plain = (held(changed(config, {"engine.pad_widths": choice}), on_gpu=True) for choice in ("on", "off"))
    with torch.device("meta"):
        parameters = TransformerXL(config.model, vocab_size=300).parameters()
    copied = 12 * sum(parameter.numel() for parameter in parameters if parameter.dim() > 1)
    assert padded["activations"] + padded["gradients"] == copied
    assert plain["activations"] + plain["gradients"] < copied


def test_only_a_gpu_that_runs_triton_kernels_updates_without_copies_of_the_gradients() -> None:
    wide = {"num_layers": 1, "width": 256, "num_heads": 2, "head_width": 128, "ff_width": 8192, "cutoffs": []}
    short = {"num_lanes": 1, "microbatch_lanes": 1, "segment_len": 4, "memory_len": 0}
    config = tiny_config(model=wide, train=short, engine={"precision": "fp16", "zero_stage": 1})
    plan = plan_batch(config.train, world_size=1)
    by_kernel, by_torch = (
        bytes_per_rank(config, plan=plan, vocab_size=300, on_gpu=True, runs_triton=runs) for runs in (True, False)
    )
    copies = 6 * count_parameters(config.model, vocab_size=300)  # joined in fp16, and then in fp32
    assert by_torch["activations"] == copies > 2 * by_kernel["activations"]


def test_a_gpu_that_runs_no_triton_kernels_needs_what_fused_attention_needs() -> None:
    engine = {"precision": "bf16", "zero_stage": 1, "keep_scores": "on"}
    config = tiny_config(train={"segment_len": 64, "memory_len": 64}, engine=engine)
    plan = plan_batch(config.train, world_size=1)

    def bytes_on_gpu(attention: str, *, runs_triton: bool) -> dict[str, float]:
        chosen = changed(config, {"engine.attention": attention})
        return bytes_per_rank(chosen, plan=plan, vocab_size=300, on_gpu=True, runs_triton=runs_triton)

    assert bytes_on_gpu("auto", runs_triton=False) == bytes_on_gpu("fused", runs_triton=False)
    assert bytes_on_gpu("auto", runs_triton=True) != bytes_on_gpu("fused", runs_triton=True)


def test_half_precision_halves_weights_and_memories_and_has_fp32_masters() -> None:
    parameters = count_parameters(tiny_config().model, vocab_size=300)
    full, half = held(tiny_config()), held(tiny_config(engine={"precision": "bf16"}), on_gpu=True)
    assert (half["weights"], half["memories"]) == (full["weights"] / 2, full["memories"] / 2)
    assert half["optimizer"] == 12 * parameters
    assert half["buckets"] == 0.0  # one rank exchanges nothing
    on_two_ranks = held(tiny_config(engine={"precision": "bf16"}), world_size=2, on_gpu=True)
    assert on_two_ranks["buckets"] == 2 * 2 * BUCKET_LEN  # two of them, in bf16
    off = held(tiny_config(engine={"precision": "bf16", "offload_optimizer": True}), on_gpu=True)
    assert off["optimizer"] == 0.0


def test_what_a_graph_needs_stays_beside_everything_else() -> None:
    train = {"num_lanes": 4, "microbatch_lanes": 2, "segment_len": 8, "memory_len": 12}
    model: dict[str, Any] = {
        "cutoffs": [],
        "div_value": 1,
        "tie_projections": [],
    }
    for stage in (0, 1, 2):
        eager, graphed, auto = (
            held(
                tiny_config(
                    model=model, train=train, engine={"precision": "bf16", "zero_stage": stage, "cuda_graph": choice}
                ),
                on_gpu=True,
            )
            for choice in ("off", "on", "auto")
        )
        assert graphed == auto
        gradients = 2 * count_parameters(tiny_config(model=model).model, vocab_size=300)
        memory = 2 * 2 * 12 * 32 * 2  # of the two lanes at work
        more = sum(graphed.values()) - sum(eager.values())
        # At stage 1 Adam's kernel copies no gradients after the micro-steps, so the graph stays beside less.
        least = memory if stage == 1 else gradients / 2 + memory
        assert more >= least, "its gradients, and the memory that it is given"


@pytest.mark.parametrize(("microbatch_lanes", "num_lane_memories"), [(4, 0), (2, 6)])
def test_the_memory_of_a_single_micro_batch_lies_in_its_graph(microbatch_lanes: int, num_lane_memories: int) -> None:
    train = {"num_lanes": 4, "microbatch_lanes": microbatch_lanes, "segment_len": 8, "memory_len": 12}
    config = tiny_config(train=train, engine={"precision": "bf16", "cuda_graph": "on"})
    lane_memory = config.model.num_layers * 12 * config.model.width * 2
    assert held(config, on_gpu=True)["memories"] == num_lane_memories * lane_memory


@pytest.mark.parametrize("stage", [2, 3])
def test_an_update_that_is_fuller_than_a_micro_step_is_the_peak(stage: int) -> None:
    wide = {"num_layers": 1, "width": 256, "num_heads": 2, "head_width": 128, "ff_width": 8192, "cutoffs": []}
    train = {"num_lanes": 1, "microbatch_lanes": 1, "segment_len": 4, "memory_len": 0}
    engine = {"precision": "fp16", "zero_stage": stage, "attention": "fused"}  # without the kernel of Adam
    config = tiny_config(model=wide, train=train, engine=engine)
    bytes_by = held(config, on_gpu=True)
    parameters = count_parameters(config.model, vocab_size=300)
    temporary = bytes_by["activations"] + bytes_by["scores"]
    assert temporary == pytest.approx((4 + 2) * parameters)  # the gradients in fp32, and a flat copy


def test_chunks_of_logits_and_scores_are_as_large_as_on_a_gpu() -> None:
    step = MicroStep(
        model=tiny_config(model={"cutoffs": []}).model,
        vocab_size=50_000,
        cluster_shares=(1.0,),
        lanes=4,
        segment_len=512,
        memory_len=0,
        dtype=torch.bfloat16,
        attention="auto",
        recompute_every=0,
        is_flat=True,
        on_gpu=True,
    )
    made = [event.size for event in footprint_step.follow(step).events if isinstance(event, footprint_step.Made)]
    assert 2 * 4 * 512 * 50_000 in made, "two bytes for each logit of all tokens, which are one chunk"
    assert made.count(2 * 4 * 2 * 512 * 512) == 4, "all scores, in each pass of both layers"
    assert fused_softmax.CHUNK_ROWS["cpu"] == 64


def test_distance_scores_that_are_kept_are_counted_for_every_layer_but_not_where_blocks_are_recomputed() -> None:
    long = {"train": {"segment_len": 256, "memory_len": 256}}

    def needed(choice: str, **engine: Any) -> float:
        settings = {"precision": "bf16", "zero_stage": 0, "keep_scores": choice, **engine}
        return sum(held(tiny_config(model={"num_layers": 4}, **long, engine=settings), on_gpu=True).values())

    train = tiny_config(model={"num_layers": 4}, **long).train
    layer = 2 * train.microbatch_lanes * tiny_config().model.num_heads * 256 * 512
    more = needed("on") - needed("off")
    assert 3 * layer <= more <= 4 * layer
    recomputed = {"activation_checkpointing": True}
    assert needed("on", **recomputed) - needed("off", **recomputed) <= layer


@pytest.mark.parametrize(("stage", "size"), [(0, 2), (1, 2), (2, 4), (3, 4)])
def test_gradients_of_bf16_are_summed_in_fp32_from_stage_2_on(stage: int, size: int) -> None:
    parameters = count_parameters(tiny_config().model, vocab_size=300)
    assert held(tiny_config(engine={"precision": "bf16", "zero_stage": stage}))["gradients"] == size * parameters
    assert held(tiny_config(engine={"precision": "fp16", "zero_stage": stage}))["gradients"] == 2 * parameters


def test_the_update_of_half_precision_without_sharding_has_gradients_in_fp32() -> None:
    wide = {"num_layers": 1, "width": 256, "num_heads": 2, "head_width": 128, "ff_width": 8192, "cutoffs": []}
    train = {"num_lanes": 1, "microbatch_lanes": 1, "segment_len": 4, "memory_len": 0}
    config = tiny_config(model=wide, train=train, engine={"precision": "bf16", "zero_stage": 0})
    bytes_by = held(config, on_gpu=True)
    temporary = bytes_by["activations"] + bytes_by["scores"]
    assert temporary == pytest.approx(4 * count_parameters(config.model, vocab_size=300))


def test_what_saves_memory_is_foreseen_to() -> None:
    long = {"train": {"segment_len": 256, "memory_len": 256}}
    deep = {"num_layers": 4}  # what the kernels need for one layer at a time counts once

    def activations(**engine: Any) -> float:
        config = tiny_config(model=deep, **long, engine={"precision": "bf16", "zero_stage": 0, **engine})
        bytes_by = held(config, on_gpu=True)
        return bytes_by["activations"] + bytes_by["scores"]

    assert activations(attention="auto") < 0.6 * activations(attention="fused") <= activations(attention="plain")
    assert activations(attention="fused", activation_checkpointing=True) < 0.9 * activations(attention="fused")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"cutoffs": [], "attention_dropout": 0.1}},
        {"model": {"num_layers": 3}, "engine": {"activation_checkpointing": True, "recompute_every": 2}},
        {"model": {"tie_weights": False, "pre_norm": True}, "engine": {"attention": "plain"}},
        {"model": {"positions": "absolute"}, "train": {"memory_len": 0}},
        {"model": {"positions": "learned_relative", "num_distances": 16}},
    ],
)
def test_the_fast_way_to_follow_a_step_shows_the_same_bytes_at_every_stage(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On fake tensors, which know their device, and on meta tensors, which do not."""

    @contextmanager
    def fake(model: object) -> Iterator[None]:
        with FakeTensorMode(), torch.device("cpu"):
            yield

    def at_all_stages() -> list[dict[str, float]]:
        return [
            held(tiny_config(**changes | {"engine": changes.get("engine", {}) | {"zero_stage": stage}}), world_size=2)
            for stage in range(4)
        ]

    footprint_step.follow.cache_clear()
    fast = at_all_stages()
    footprint_step.follow.cache_clear()
    monkeypatch.setattr(footprint_step, "_without_storage", fake)
    assert at_all_stages() == fast
    footprint_step.follow.cache_clear()


def test_stages_share_what_was_followed() -> None:
    """Whatever becomes of the gradients, the step is run once; again at stage 3, whose parameters are not flat."""
    footprint_step.follow.cache_clear()
    for stage in range(4):
        held(tiny_config(engine={"zero_stage": stage}), world_size=2, on_gpu=True)
    assert footprint_step.follow.cache_info().misses == 2


def test_predicting_leaves_the_process_as_it_was() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    held(tiny_config(engine={"precision": "bf16"}))
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(torch.rand(3), expected)
