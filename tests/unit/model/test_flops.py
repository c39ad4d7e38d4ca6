"""The formula for operations, compared with torch's count for real models, and the peak rates of GPUs for MFU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.models import tiny_section
from txl_dist.model.flops import count_parameters, flops_by_part, peak_tflops
from txl_dist.model.memory import Memory
from txl_dist.model.prediction_order import PredictionOrder
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.vocabulary_clusters import ClusterRows, cluster_edges, typical_shares

STACKS = {
    "A": ({"num_layers": 4, "width": 256, "num_heads": 4, "head_width": 64, "ff_width": 1024}, 128, 8),
    "B": ({"num_layers": 2, "width": 512, "num_heads": 8, "head_width": 64, "ff_width": 2048}, 512, 2),
}
"""Settings, T = M, lanes: the layers that the benchmarks take."""


def counted(run: Callable[[], Any]) -> int:
    """Operations of the products in forward and backward, on the meta device: nothing is computed."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def on_meta(*, vocab_size: int, lanes: int, length: int, **settings: Any) -> tuple[TransformerXL, torch.Tensor, Memory]:
    """A model that executes what the formula counts, ids and a full memory of the segment's length."""
    with torch.device("meta"):
        model = TransformerXL(tiny_section(**settings), vocab_size=vocab_size, attention="fused")
        memory = model.empty_memory(num_lanes=lanes, memory_len=length)
        return model, torch.empty(lanes, length, dtype=torch.int64), memory


def rows_on_meta(sizes: tuple[int, ...]) -> tuple[ClusterRows, ...]:
    return tuple(ClusterRows(*torch.empty(2, size, dtype=torch.int64, device="meta")) for size in sizes)


@pytest.mark.parametrize("stack", STACKS)
def test_the_layers_execute_what_the_formula_says(stack: str) -> None:
    settings, length, lanes = STACKS[stack]
    model, ids_BT, memory = on_meta(vocab_size=100, lanes=lanes, length=length, **settings)
    executed = counted(lambda: model(ids_BT, memory)[0].sum().backward())
    parts = flops_by_part(
        model.section,
        vocab_size=100,
        segment_len=length,
        memory_lens=[length] * len(memory.hidden),
        microbatch_lanes=lanes,
    )
    formula = (sum(parts.values()) - parts["softmax"]) * lanes * length
    assert 0.97 < executed / formula < 1.03


@pytest.mark.parametrize("reuse_len", [32, 64])
def test_a_step_in_any_order_executes_what_the_formula_says(reuse_len: int) -> None:
    lanes, length, num_targets, vocab_size = 8, 64, 11, 1000
    model, ids_BT, memory = on_meta(
        vocab_size=vocab_size, lanes=lanes, length=length, num_layers=2, width=64, num_heads=2, any_order=True
    )
    place_Bm = torch.empty(lanes, num_targets, dtype=torch.int64, device="meta")
    order = PredictionOrder(ids_BT, ids_BT, place_Bm, reuse_len)

    def step() -> None:
        hidden, _ = model(ids_BT, memory, order=order)
        model.softmax(hidden, place_Bm).sum().backward()

    parts = flops_by_part(
        model.section,
        vocab_size=vocab_size,
        segment_len=length,
        memory_lens=[length] * len(memory.hidden),
        microbatch_lanes=lanes,
        step_len=reuse_len,
        num_targets=num_targets,
    )
    formula = sum(parts.values()) * lanes * reuse_len
    # The relative shift computes up to K + T - 1 distances per row, of which K are useful.
    assert 0.97 < counted(step) / formula < 1.12


def test_in_any_order_the_embedding_reads_all_tokens_and_the_softmax_predicts_the_targets() -> None:
    lanes, length, reuse_len, num_targets, vocab_size = 8, 64, 32, 11, 1000
    narrow: dict[str, Any] = {"embed_width": 16, "tie_projections": (True,), "any_order": True}
    model, ids_BT, _ = on_meta(
        vocab_size=vocab_size, lanes=lanes, length=length, num_layers=1, width=64, num_heads=2, **narrow
    )

    def run() -> None:
        hidden_BTD = model.embedding(ids_BT)
        model.softmax(hidden_BTD[:, :num_targets], ids_BT[:, :num_targets]).sum().backward()

    parts = flops_by_part(
        model.section,
        vocab_size=vocab_size,
        segment_len=length,
        memory_lens=[length],
        microbatch_lanes=lanes,
        step_len=reuse_len,
        num_targets=num_targets,
    )
    assert counted(run) == pytest.approx((parts["softmax"] + parts["projections"]) * lanes * reuse_len, rel=1e-9)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cutoffs": (200, 500)},
        {"cutoffs": (200, 500), "div_value": 2, "tie_projections": (False, True, True)},
        {"cutoffs": (200, 500), "div_value": 2, "project_same_width": False},
        {"embed_width": 16, "tie_projections": (True,)},
    ],
    ids=["plain", "one table", "narrower tails", "an unprojected head", "one narrower table"],
)
def test_the_vocabulary_executes_what_the_formula_says_for_given_shares(settings: dict[str, Any]) -> None:
    lanes, length, vocab_size = 8, 64, 1000
    model, ids_BT, _ = on_meta(
        vocab_size=vocab_size, lanes=lanes, length=length, num_layers=1, width=64, num_heads=2, **settings
    )
    sizes = (
        (256, 128, 128) if "cutoffs" in settings else (lanes * length,)
    )  # multiples of 128, so that nothing is padded
    edges = cluster_edges(settings.get("cutoffs", ()), vocab_size=vocab_size)
    assert len(sizes) == len(edges) - 1

    def run() -> None:
        hidden_BTD = model.embedding(ids_BT, partition=rows_on_meta(sizes))
        model.softmax(hidden_BTD, ids_BT, partition=rows_on_meta(sizes)).sum().backward()

    parts = flops_by_part(
        model.section,
        vocab_size=vocab_size,
        segment_len=length,
        memory_lens=[length],
        microbatch_lanes=lanes,
        cluster_shares=[size / (lanes * length) for size in sizes],
    )
    assert counted(run) == pytest.approx((parts["softmax"] + parts["projections"]) * lanes * length, rel=1e-9)
    assert (parts["projections"] > 0) == (settings.get("div_value", 1) > 1 or "embed_width" in settings)


def test_a_fixed_attended_length_and_other_positions_cost_what_they_see() -> None:
    layers = tiny_section().num_layers
    lengths = {"vocab_size": 50, "segment_len": 16, "memory_lens": [32] * layers, "microbatch_lanes": 4}
    relative = flops_by_part(tiny_section(), **lengths)
    assert relative["scores"] == 2 * relative["shift"]
    for same_length, seen in (("memory", 32), ("memory_and_self", 33)):
        fixed = flops_by_part(tiny_section(same_length=same_length), **lengths)
        assert fixed["scores"] / relative["scores"] == pytest.approx(seen / (32 + 17 / 2))
    learned = flops_by_part(tiny_section(positions="learned_relative", num_distances=48), **lengths)
    assert (learned["distances"], learned["shift"]) == (0.0, relative["shift"])
    absolute = flops_by_part(tiny_section(positions="absolute"), **lengths | {"memory_lens": [0] * layers})
    assert (absolute["distances"], absolute["shift"], absolute["memory"]) == (0.0, 0.0, 0.0)


def test_published_models_cost_what_is_published_of_them() -> None:
    """In millions of operations per token, by hand from the formula; 6 per parameter would be far off."""
    enwik8 = tiny_section(num_layers=12, width=512, num_heads=8, head_width=64, ff_width=2048)
    lengths = {"segment_len": 512, "memory_lens": [512] * 12, "microbatch_lanes": 22}
    assert sum(flops_by_part(enwik8, vocab_size=204, **lengths).values()) / 1e6 == pytest.approx(338, rel=0.01)
    assert count_parameters(enwik8, vocab_size=204) == pytest.approx(41e6, rel=0.01)


def test_the_shares_assumed_without_counts_are_near_those_counted_on_wikitext_103() -> None:
    shares = typical_shares((0, 20_000, 40_000, 200_000, 267_735))
    assert sum(shares) == pytest.approx(1.0)
    assert shares == pytest.approx((0.952, 0.022, 0.024, 0.002), abs=0.01)
    assert typical_shares((0, 50)) == (1.0,)


@pytest.mark.parametrize(
    ("name", "half", "fp32"),
    [
        ("NVIDIA H200", 989.4, 66.9),
        ("NVIDIA H100 80GB HBM3", 989.4, 66.9),
        ("NVIDIA H100 PCIe", 756.0, 51.0),
        ("NVIDIA A100-SXM4-80GB", 312.0, 19.5),
        ("Tesla V100-SXM2-16GB", 125.0, 15.7),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("NVIDIA GeForce RTX 4090 D", 165.2, 82.6),
        ("NVIDIA L40S", 362.1, 91.6),
        ("NVIDIA A10G", 0.0, 0.0),
        ("cpu", 0.0, 0.0),
    ],
)
def test_a_device_is_known_by_its_name_or_not_at_all(name: str, half: float, fp32: float) -> None:
    assert (peak_tflops(name, precision="bf16"), peak_tflops(name, precision="fp32")) == (half, fp32)
    assert peak_tflops(name, precision="fp16") == half
