"""The protocols of other codes, each compared with a short implementation of its description (docs/evaluating.md)."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.bundles import MEMORY_LEN, SEGMENT_LEN, Made, make
from tests.helpers.models import tiny_section
from txl_dist.data.loader.protocols import PeerRows, RandomCrops
from txl_dist.errors import ConfigError
from txl_dist.evaluation.evaluate import evaluate_trained
from txl_dist.evaluation.options import NUM_CROP_BATCHES, PROTOCOLS, Outputs, Overrides
from txl_dist.model.transformer_xl import TransformerXL

TEXTS = ["abcab" * 60 + "d" * i for i in range(24)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("protocols"), texts=TEXTS)


def evaluated(made: Made, **changes: Any) -> tuple[dict[str, dict[str, Any]], list[str]]:
    out = made.bundle.parent / "result.json"
    lines = evaluate_trained(
        made.bundle, data=made.corpus.folder, overrides=Overrides(**changes), baselines=False,
        outputs=Outputs(json=out),
    )  # fmt: skip
    return json.loads(out.read_text()), lines


def network(made: Made, **section: Any) -> TransformerXL:
    model = TransformerXL(tiny_section(init_std=0.2, **made.settings, **section), vocab_size=made.corpus.vocab_size)
    model.load_state_dict(made.weights, strict=False)
    return model.eval()


def held_out(made: Made) -> Tensor:
    return torch.from_numpy(made.corpus.split("valid").read_all().astype(np.int64))


@torch.no_grad()
def naive_rows(model: TransformerXL, rows: Tensor, *, segment_len: int, memory_len: int, num_warm: int = 0) -> float:
    """LMOrderedIterator and evaluate() of eval.py: each segment's mean weighted by its length."""
    memory, total_loss, total_len = model.empty_memory(num_lanes=len(rows), memory_len=memory_len), 0.0, 0
    for i in range(0, rows.shape[1] - 1, segment_len):
        seq_len = min(segment_len, rows.shape[1] - 1 - i)
        hidden, memory = model(rows[:, i : i + seq_len], memory)
        if i >= num_warm:
            total_loss += seq_len * float(model.softmax(hidden, rows[:, i + 1 : i + 1 + seq_len]).double().mean())
            total_len += seq_len
    return total_loss / total_len


@pytest.mark.parametrize("lengths", [(SEGMENT_LEN, MEMORY_LEN, -1), (7, 40, 12)], ids=str)
def test_the_original_runs_ten_rows_from_an_empty_memory_without_the_remainder(
    made: Made, lengths: tuple[int, int, int]
) -> None:
    segment_len, memory_len, clamp_len = lengths
    results, lines = evaluated(
        made, protocol="original", segment_len=(segment_len,), memory_len=(memory_len,), clamp_len=(clamp_len,)
    )
    tokens = held_out(made)
    rows = tokens[: len(tokens) // 10 * 10].view(10, -1)
    model = network(made, same_length="memory", clamp_len=max(clamp_len, 0))
    expected = naive_rows(model, rows, segment_len=segment_len, memory_len=memory_len)
    result = results["original"]
    assert result["loss"] == pytest.approx(expected, rel=1e-5)
    assert result["tokens"] == 10 * (rows.shape[1] - 1) < len(tokens) - 1
    assert result["bits_per_token"] == pytest.approx(result["loss"] / math.log(2))
    assert "bits_per_byte" not in result
    assert "by the protocol original (kimiyoung/transformer-xl, pytorch/eval.py)" in lines[0]


def test_the_original_counts_a_model_with_absolute_positions_on_the_same_segments(tmp_path: Path) -> None:
    made = make(tmp_path, texts=TEXTS, positions="absolute", memory_len=0)
    tokens = held_out(made)
    rows = tokens[: len(tokens) // 10 * 10].view(10, -1)
    assert (rows.shape[1] - 1) % SEGMENT_LEN, "the last segment is shorter"
    expected = naive_rows(network(made), rows, segment_len=SEGMENT_LEN, memory_len=0)
    assert evaluated(made, protocol="original")[0]["original"]["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("lengths", [(SEGMENT_LEN, MEMORY_LEN), (7, 40)], ids=str)
def test_nvidia_warms_each_row_up_on_the_end_of_the_row_before(made: Made, lengths: tuple[int, int]) -> None:
    segment_len, memory_len = lengths
    results, _ = evaluated(made, protocol="nvidia", segment_len=(segment_len,), memory_len=(memory_len,))
    tokens = held_out(made)
    data = tokens[: len(tokens) // 16 * 16].view(16, -1).t()
    num_warm = (memory_len + segment_len - 1) // segment_len * segment_len
    assert num_warm > memory_len, "it is rounded up"
    warm_up = data.roll((num_warm, 1), (0, 1))[:num_warm]
    expected = naive_rows(
        network(made, same_length="memory_and_self"), torch.cat([warm_up, data]).t(), segment_len=segment_len,
        memory_len=memory_len, num_warm=num_warm,
    )  # fmt: skip
    assert results["nvidia"]["loss"] == pytest.approx(expected, rel=1e-5)
    assert results["nvidia"]["tokens"] == 16 * (len(data) - 1)


@torch.no_grad()
def test_nanogpt_averages_random_crops_that_stand_alone(made: Made) -> None:
    results, _ = evaluated(made, protocol="nanogpt", num_lanes=3)
    tokens, model = held_out(made), network(made)
    losses, generator = [], np.random.default_rng(1337)
    for _ in range(NUM_CROP_BATCHES):
        starts = generator.integers(0, len(tokens) - SEGMENT_LEN, 3)
        x = torch.stack([tokens[i : i + SEGMENT_LEN] for i in starts])
        y = torch.stack([tokens[i + 1 : i + 1 + SEGMENT_LEN] for i in starts])
        hidden, _ = model(x, model.empty_memory(num_lanes=3, memory_len=0))
        losses.append(float(model.softmax(hidden, y).double().mean()))
    result = results["nanogpt"]
    assert result["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert result["tokens"] == NUM_CROP_BATCHES * 3 * SEGMENT_LEN
    assert result["memory_len"] == 0


def test_a_protocol_takes_lengths_and_names_its_rows(made: Made) -> None:
    results, _ = evaluated(made, protocol="original", memory_len=(8, 40))
    assert list(results) == ["original, memory 8", "original, memory 40"]
    assert {values["protocol"] for values in results.values()} == {"original"}
    results, _ = evaluated(made, protocol="original", memory_len=(0,))
    tokens = held_out(made)
    rows = tokens[: len(tokens) // 10 * 10].view(10, -1)
    expected = naive_rows(network(made), rows, segment_len=SEGMENT_LEN, memory_len=0)
    assert results["original"]["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", PROTOCOLS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_run_the_rows_of_one(made: Made, name: str, world_size: int) -> None:
    split, place = made.corpus.split("valid"), {"num_lanes": 4, "segment_len": 9}

    def segments(rank: int, world_size: int) -> list[Any]:
        where = {"rank": rank, "world_size": world_size}
        if name == "nanogpt":
            return list(RandomCrops(split, num_batches=3, seed=1, **place, **where))
        return list(PeerRows(split, warm_up_len=20 if name == "nvidia" else 0, **place, **where))

    alone = segments(0, 1)
    together = zip(*(segments(rank, world_size) for rank in range(world_size)), strict=True)
    for one, parts in zip(alone, together, strict=True):
        for field in ("tokens", "scored"):
            joined = np.concatenate([getattr(part, field) for part in parts])
            assert np.array_equal(joined[:4], getattr(one, field))
            assert not joined[4:].any()


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_peer_s_rows_take_as_much_memory_as_the_split_as_it_is_stored(name: str) -> None:
    """Not at once for every row of a sweep, but while one is run."""
    tokens = np.arange(1_000_000).astype(np.uint16)
    split: Any = SimpleNamespace(name="valid", tokens=len(tokens), read_all=tokens.copy)
    place = {"num_lanes": 4, "segment_len": 500, "rank": 0, "world_size": 1}
    tracemalloc.start()
    cuts = [
        RandomCrops(split, num_batches=3, seed=1, **place)
        if name == "nanogpt"
        else PeerRows(split, warm_up_len=2000 if name == "nvidia" else 0, **place)
        for _ in range(4)
    ]
    segments = [sum(segment.scored.sum() for segment in cut) for cut in cuts]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert segments == [cut.num_targets for cut in cuts]
    assert peak < 1.3 * tokens.nbytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"protocol": "original", "num_lanes": 4}, "--num-lanes cannot be given with --protocol original"),
        ({"protocol": "original", "same_length": "memory_and_self"}, "--same-length cannot be given"),
        ({"protocol": "nvidia", "zero_memory": True}, "--zero-memory cannot be given with --protocol nvidia"),
        ({"protocol": "nvidia", "overlap_len": 4, "memory_len": (0,)}, "--overlap-len cannot be given"),
        ({"protocol": "nvidia", "without_memory": True}, "--without-memory cannot be given"),
        ({"protocol": "nanogpt", "memory_len": (8,)}, "--memory-len cannot be given with --protocol nanogpt"),
        ({"protocol": "nvidia", "memory_len": (10**5,)}, "is|has .* tokens, .* for each of this protocol's 16 rows"),
        ({"protocol": "nanogpt", "segment_len": (10**5,)}, "at least 100,001 tokens are needed: one segment, and"),
    ],
    ids=str,
)
def test_what_a_protocol_has_itself_is_refused(made: Made, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluated(made, **changes)


def test_a_model_with_document_masks_has_no_protocol_of_a_peer(tmp_path: Path) -> None:
    made = make(tmp_path, document_mask=True)
    with pytest.raises(ConfigError, match="--protocol original reads across document boundaries"):
        evaluated(made, protocol="original")
