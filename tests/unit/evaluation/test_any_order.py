"""`txl evaluate` of a model that predicts in any order (XLNet), compared with loops that mask one token at a time."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.bundles import SEGMENT_LEN, Made, make
from tests.helpers.checkpoints import sign
from txl_dist.config.load import load_config
from txl_dist.config.schema import TargetLengths, TrainSection, halves_of
from txl_dist.console.formatting import flag_of
from txl_dist.data.loader.evaluation import EvalStream
from txl_dist.data.loader.stream import Segment
from txl_dist.errors import ConfigError, DataError
from txl_dist.evaluation.any_order import (
    TOKENS_PER_SCORED,
    left_to_right_targets,
    scored_places,
    single_token_targets,
)
from txl_dist.evaluation.evaluate import evaluate_trained
from txl_dist.evaluation.options import AdaptationOptions, Outputs, Overrides
from txl_dist.evaluation.target import open_target
from txl_dist.inference.bundle import load_bundle
from txl_dist.model.prediction_order import PredictionOrder
from txl_dist.model.transformer_xl import TransformerXL

ANY_ORDER: dict[str, Any] = {"any_order": True, "share_biases": False}
REUSE_LEN = 8
LENGTHS = TargetLengths(REUSE_LEN)


@pytest.fixture(scope="module", params=[False, True], ids=["across documents", "document masks"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("any_order")
    return make(folder, target_lengths=LENGTHS, document_mask=request.param, **ANY_ORDER)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("plain"), target_lengths=LENGTHS, **ANY_ORDER)


def evaluated(made: Made, **changes: Any) -> tuple[dict[str, Any], list[str]]:
    out = made.bundle.parent / "result.json"
    overrides = Overrides(**({"num_lanes": 1} | changes))
    lines = evaluate_trained(
        made.bundle, data=made.corpus.folder, overrides=overrides, baselines=False, outputs=Outputs(json=out)
    )
    return json.loads(out.read_text()), lines


def model_of(made: Made) -> TransformerXL:
    return load_bundle(made.bundle).model


def held_out(made: Made) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, document numbers) of the split as one lane, both of length S."""
    split = made.corpus.split("valid")
    (segment,) = EvalStream(split, num_lanes=1, segment_len=split.tokens)
    return torch.from_numpy(segment.tokens[0]), torch.from_numpy(segment.documents[0])


@torch.no_grad()
def loss_of_one(
    model: TransformerXL, tokens_S: torch.Tensor, place: int, seen: list[bool], *, documents_S: torch.Tensor | None
) -> float:
    """Nats of the token at a place, whose query row sees the marked tokens. Each token sees the marked ones and
    itself, and nobody sees the token at the place unless it is marked."""
    key_S = torch.tensor([0 if is_seen else 1 for is_seen in seen])
    order = PredictionOrder(torch.ones_like(key_S)[None], key_S[None], torch.tensor([[place]]), len(tokens_S))
    document_BT = None if documents_S is None else documents_S[None]
    memory = model.empty_memory(num_lanes=1, memory_len=0)
    hidden_B1D, _ = model(tokens_S[None], memory, document_BT=document_BT, order=order)
    return float(model.softmax.losses(hidden_B1D, tokens_S[None, place : place + 1]))


def test_left_to_right_predicts_each_token_once_from_all_tokens_before_it(made: Made) -> None:
    document_mask = load_bundle(made.bundle).document_mask
    results, _ = evaluated(made, prediction=("left_to_right",), memory_len=(400,))
    tokens_S, documents_S = held_out(made)
    model = model_of(made)
    key_1S = torch.arange(len(tokens_S))[None]
    place_1m = torch.arange(1, len(tokens_S))[None]
    if document_mask:
        place_1m = place_1m[:, documents_S[1:] == documents_S[:-1]]
    order = PredictionOrder(key_1S, key_1S, place_1m, len(tokens_S))
    memory = model.empty_memory(num_lanes=1, memory_len=0)
    with torch.no_grad():  # no query sees another query, so one pass predicts all tokens
        hidden_1mD, _ = model(
            tokens_S[None], memory, document_BT=documents_S[None] if document_mask else None, order=order
        )
        losses = model.softmax.losses(hidden_1mD, tokens_S[place_1m])[0].tolist()
    (result,) = results.values()
    assert result["tokens"] == len(losses)
    assert result["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert ("bits_per_byte" in result) == (not document_mask)


def test_left_to_right_bits_per_byte_are_nats_over_the_bytes_of_the_whole_text(plain: Made) -> None:
    split = plain.corpus.split("valid")
    results, lines = evaluated(plain, prediction=("left_to_right",), num_lanes=3)
    (result,) = results.values()
    assert result["tokens"] == split.tokens - 1
    expected = result["loss"] / math.log(2) * split.tokens / split.text_bytes
    assert result["bits_per_byte"] == pytest.approx(expected)
    assert "bits/byte" in "\n".join(lines)


def test_left_to_right_without_a_memory_still_sees_the_token_before_each_segment(plain: Made) -> None:
    results, _ = evaluated(plain, prediction=("left_to_right",), memory_len=(0,))
    tokens_S, _ = held_out(plain)
    model = model_of(plain)
    losses = []
    for begin in range(0, len(tokens_S) - 1, SEGMENT_LEN):
        part_T = tokens_S[begin : begin + SEGMENT_LEN + 1]
        for place in range(1, len(part_T)):
            seen = [index < place for index in range(len(part_T))]
            key_T = torch.arange(len(part_T))[None]
            order = PredictionOrder(key_T, key_T, torch.tensor([[place]]), len(part_T))
            memory = model.empty_memory(num_lanes=1, memory_len=0)
            with torch.no_grad():
                hidden_B1D, _ = model(part_T[None], memory, order=order)
                losses.append(float(model.softmax.losses(hidden_B1D, part_T[None, place : place + 1])))
            assert sum(seen) == place
    (result,) = results.values()
    assert result["tokens"] == len(losses)
    assert result["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_pseudo_likelihood_predicts_a_token_from_all_other_tokens_of_its_segment(made: Made) -> None:
    document_mask = load_bundle(made.bundle).document_mask
    results, _ = evaluated(made, prediction=("pseudo_likelihood",), memory_len=(0,))
    split = made.corpus.split("valid")
    stream = EvalStream(split, num_lanes=1, segment_len=SEGMENT_LEN, step_len=REUSE_LEN)
    halves = halves_of(SEGMENT_LEN, reuse_len=REUSE_LEN, predicted_len=2)
    model = model_of(made)
    losses = []
    for index, segment in enumerate(stream):
        ((place,),) = scored_places(segment, halves[-1], lanes=range(1), position=index * REUSE_LEN)
        if place < 0 or not segment.scored.all():
            continue
        assert REUSE_LEN <= place < SEGMENT_LEN
        tokens_T = torch.from_numpy(segment.tokens[0, 1:])
        documents_T = torch.from_numpy(segment.documents[0, 1:]) if document_mask else None
        other = tokens_T.clone()
        other[place] = (other[place] + 1) % made.corpus.vocab_size
        seen = [one != place for one in range(SEGMENT_LEN)]
        # The first half sees nothing of the second half, so its rows are computed with the levels of the two halves.
        half_T = (torch.arange(SEGMENT_LEN) >= REUSE_LEN).long()
        key_T = 2 * half_T + torch.tensor([0 if is_seen else 1 for is_seen in seen])
        order = PredictionOrder((2 * half_T + 1)[None], key_T[None], torch.tensor([[int(place)]]), REUSE_LEN)
        memory = model.empty_memory(num_lanes=1, memory_len=0)
        found = []
        with torch.no_grad():
            for content_T in (tokens_T, other):
                hidden_B1D, _ = model(
                    content_T[None], memory, document_BT=None if documents_T is None else documents_T[None], order=order
                )
                found.append(float(model.softmax.losses(hidden_B1D, tokens_T[None, place : place + 1])))
        assert found[0] == found[1], "the token itself does not reach its prediction"
        losses.append(found[0])
    (result,) = results.values()
    assert result["tokens"] == len(losses) > 3
    assert result["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert "bits_per_byte" not in result


def test_with_one_half_pseudo_likelihood_sees_every_other_token(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole", **ANY_ORDER)
    results, _ = evaluated(whole, prediction=("pseudo_likelihood",), memory_len=(0,))
    stream = EvalStream(whole.corpus.split("valid"), num_lanes=1, segment_len=SEGMENT_LEN)
    halves = halves_of(SEGMENT_LEN, reuse_len=SEGMENT_LEN, predicted_len=2)
    losses = []
    for index, segment in enumerate(stream):
        ((place,),) = scored_places(segment, halves[0], lanes=range(1), position=index * SEGMENT_LEN)
        if segment.scored.all():
            seen = [one != place for one in range(SEGMENT_LEN)]
            tokens_T = torch.from_numpy(segment.tokens[0, 1:])
            losses.append(loss_of_one(model_of(whole), tokens_T, int(place), seen, documents_S=None))
    (result,) = results.values()
    assert result["tokens"] == len(losses) > 3
    assert result["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_each_prediction_and_each_memory_has_a_row_and_random_orders_show_their_ranks(plain: Made) -> None:
    results, lines = evaluated(
        plain,
        prediction=("random_order", "left_to_right", "pseudo_likelihood"),
        memory_len=(0, 24),
        without_memory=True,
        orders=3,
    )
    kinds = ("random orders", "left to right", "pseudo-likelihood")
    rows = ("memory 0", "memory 24", "memory off, memory 0")
    assert set(results) == {f"{kind}, {row}" for kind in kinds for row in rows}
    assert results["random orders, memory 0"]["loss"] == results["random orders, memory off, memory 0"]["loss"]
    assert results["random orders, memory 0"]["loss"] != results["random orders, memory 24"]["loss"]
    by_rank = results["random orders, memory 24"]["by_rank"]
    assert sum(part["tokens"] for part in by_rank) == results["random orders, memory 24"]["tokens"]
    assert "place in the order, half 2: 1: " in "\n".join(lines)
    assert "predicting 2 of every 16 tokens" in lines[0]


def test_a_bundle_predicts_as_many_tokens_in_such_spans_as_its_training(tmp_path: Path, plain: Made) -> None:
    lengths = TargetLengths(REUSE_LEN, predicted_len=6, order_len=4, longest_span=2, span_context=3)
    other = make(tmp_path / "other", target_lengths=lengths, **ANY_ORDER)
    assert load_bundle(other.bundle).target_lengths == lengths
    target = open_target(other.bundle, data=other.corpus.folder, needs_causal=False)
    assert target.config.train.target_lengths == lengths
    assert load_config(other.bundle / "train.toml").train.target_lengths == lengths
    results, lines = evaluated(other)
    assert "predicting 6 of every 16 tokens" in lines[0]
    default, _ = evaluated(plain)
    assert results["random orders"]["tokens"] > 2.5 * default["random orders"]["tokens"]


def test_a_bundle_without_these_lengths_predicts_a_sixth_of_its_segments(tmp_path: Path, plain: Made) -> None:
    """Bundles that were written before their training's lengths were stored have only `reuse_len`."""
    old = tmp_path / "old"
    shutil.copytree(plain.bundle, old)
    content = json.loads((old / "config.json").read_text())
    for name in ("predicted_len", "order_len", "longest_span", "span_context"):
        del content[name]
    (old / "config.json").write_text(json.dumps(content))
    sign(old)
    assert load_bundle(old).target_lengths == LENGTHS
    assert TargetLengths() == TrainSection().target_lengths


def test_each_score_names_the_precision_of_its_computation(plain: Made) -> None:
    assert {score["precision"] for score in evaluated(plain)[0].values()} == {"fp32"}
    assert {score["precision"] for score in evaluated(plain, precision="bf16")[0].values()} == {"bf16"}


def test_more_orders_score_more_tokens_and_the_first_order_is_the_same(plain: Made) -> None:
    one, _ = evaluated(plain, orders=1)
    again, _ = evaluated(plain)
    four, _ = evaluated(plain, orders=4)
    assert one["random orders"]["loss"] == again["random orders"]["loss"]
    assert four["random orders"]["tokens"] == 4 * one["random orders"]["tokens"]


def test_no_position_sees_a_single_target_but_the_target_sees_its_half_and_the_half_before() -> None:
    halves = halves_of(6, reuse_len=4, predicted_len=2)
    targets = single_token_targets(np.array([5, -1]), halves)
    sees_BTT = targets.key_level_BT[:, None] < targets.query_level_BT[:, :, None]
    assert sees_BTT[0, 5].tolist() == [True] * 5 + [False]
    assert not sees_BTT[0, :, 5].any()
    assert not sees_BTT[:, :4, 4:].any()
    assert targets.is_drawn_Bm.tolist() == [[True], [False]]


def test_left_to_right_targets_see_only_earlier_places() -> None:
    tokens = np.zeros((1, 5), np.int64)
    documents = np.array([[0, 0, 0, 3, 3]])
    segment = Segment(tokens, documents, np.zeros((1, 4), bool), np.ones((1, 4), bool))
    targets = left_to_right_targets(segment, num_targets=3, mask_documents=True)
    assert targets.place_Bm.tolist() == [[1, 2, 3]]
    assert targets.is_drawn_Bm.tolist() == [[True, False, True]]
    sees_TT = targets.key_level_BT[0] < targets.query_level_BT[0][:, None]
    assert sees_TT.tolist() == np.tri(4, k=-1, dtype=bool).tolist()


def test_long_segments_score_one_token_in_64(plain: Made) -> None:
    split = plain.corpus.split("valid")
    segment = next(iter(EvalStream(split, num_lanes=1, segment_len=300, step_len=140)))
    half = halves_of(300, reuse_len=140, predicted_len=2)[1]
    (places,) = scored_places(segment, half, lanes=range(1), position=0)
    assert len(set(places.tolist())) == math.ceil(160 / TOKENS_PER_SCORED) == 3
    assert all(140 <= place < 300 for place in places)
    (later,) = scored_places(segment, half, lanes=range(1), position=140)
    assert places.tolist() != later.tolist()


@pytest.mark.parametrize(
    ("flag", "changes"),
    [
        ("--protocol", {"protocol": "nanogpt"}),
        ("--segment-len", {"segment_len": (8,)}),
        ("--overlap-len", {"overlap_len": 4, "memory_len": (0,)}),
        ("--same-length", {"same_length": "memory"}),
    ],
)
def test_flags_of_next_token_prediction_are_refused_by_name(plain: Made, flag: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"{flag} cannot be given .*any order.*Remove {flag}"):
        evaluated(plain, **changes)


def test_adaptation_and_log_probabilities_are_refused_by_name(plain: Made, tmp_path: Path) -> None:
    for adaptation, outputs, flag in (
        (AdaptationOptions(adapt="cache"), Outputs(), "--adapt"),
        (AdaptationOptions(), Outputs(log_probs=tmp_path / "log_probs.npz"), "--log-probs"),
    ):
        with pytest.raises(ConfigError, match=rf"{flag} cannot be given"):
            evaluate_trained(
                plain.bundle,
                data=plain.corpus.folder,
                overrides=Overrides(),
                baselines=False,
                outputs=outputs,
                adaptation=adaptation,
            )


@pytest.mark.parametrize("changes", [{"prediction": ("left_to_right",)}, {"orders": 2}])
def test_a_causal_model_refuses_the_options_of_any_order(tmp_path: Path, changes: dict[str, Any]) -> None:
    causal = make(tmp_path / "causal")
    (name,) = changes
    with pytest.raises(ConfigError, match=rf"{flag_of(name)} needs a model .*any order.*Remove {flag_of(name)}"):
        evaluated(causal, **changes)


def test_a_split_shorter_than_a_segment_is_refused_with_its_length(tmp_path: Path) -> None:
    short = make(
        tmp_path / "short", texts=[chr(97 + index) for index in range(12)], target_lengths=LENGTHS, **ANY_ORDER
    )
    with pytest.raises(DataError, match="a segment needs 16 tokens"):
        evaluated(short)
