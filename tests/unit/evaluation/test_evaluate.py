"""`txl evaluate` with other lengths than in training, compared with a naive loop over the same weights."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import string
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.bundles import MEMORY_LEN, SEGMENT_LEN, Made, make
from tests.helpers.models import tiny_section
from txl_dist.console.progress import Progress
from txl_dist.errors import CheckpointError, ConfigError, DataError
from txl_dist.evaluation.evaluate import evaluate_trained
from txl_dist.evaluation.options import Outputs, Overrides
from txl_dist.evaluation.scoring import MEMORY_OFF, Scores
from txl_dist.inference.bundle import load_bundle, write_bundle
from txl_dist.inference.kv_cache import FrozenModel
from txl_dist.inference.options import InferencePrecision
from txl_dist.inference.probe import log_probabilities
from txl_dist.model.memory import attended, build_mask, empty_memory
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.report.pictures import chart_over_lengths
from txl_dist.train.engine import precision as precision_file
from txl_dist.train.engine.precision import Bf16Support

POSITIONS: dict[str, dict[str, Any]] = {
    "relative": {},
    "learned_relative": {"positions": "learned_relative", "num_distances": 12},
}


@pytest.fixture(scope="module", params=POSITIONS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp(request.param), **POSITIONS[request.param])


def evaluated(made: Made, **changes: Any) -> dict[str, dict[str, Any]]:
    out = made.bundle.parent / "result.json"
    outputs = Outputs(json=out, log_probs=changes.pop("log_probs", None))
    for name in {"memory_len", "segment_len", "clamp_len"} & changes.keys():
        changes[name] = changes[name] if isinstance(changes[name], tuple) else (changes[name],)
    overrides = Overrides(**({"num_lanes": 1} | changes))
    evaluate_trained(made.bundle, data=made.corpus.folder, overrides=overrides, baselines=False, outputs=outputs)
    results: dict[str, dict[str, Any]] = json.loads(out.read_text())
    return results


@torch.no_grad()
def naive_loss(
    made: Made,
    *,
    memory_len: int = MEMORY_LEN,
    segment_len: int = SEGMENT_LEN,
    overlap_len: int = 0,
    zeros: bool = False,
    **section: Any,
) -> float:
    """Mean loss of the held-out tokens, run as one lane."""
    tokens = torch.from_numpy(made.corpus.split("valid").read_all().astype(np.int64))[None]
    settings = tiny_section(init_std=0.2, **made.settings, **section)
    model = TransformerXL(settings, vocab_size=made.corpus.vocab_size).eval()
    assert not model.load_state_dict(made.weights, strict=False).unexpected_keys
    memory = model.empty_memory(num_lanes=1, memory_len=memory_len)
    if zeros:
        memory = memory._replace(document_BM=torch.zeros(1, memory_len, dtype=torch.int64))
    losses = []
    for start in range(0, tokens.shape[1] - 1, segment_len):
        first, stop = max(0, start - overlap_len), min(start + segment_len, tokens.shape[1] - 1)
        hidden_BTD, memory = model(tokens[:, first:stop], memory)
        losses.append(model.softmax(hidden_BTD, tokens[:, first + 1 : stop + 1])[:, start - first :])
    return float(torch.cat(losses, dim=1).double().mean())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"memory_len": 40, "segment_len": 5}, {"memory_len": 40, "segment_len": 5}),
        ({"clamp_len": 6}, {"clamp_len": 6}),
        ({"same_length": "memory"}, {"same_length": "memory"}),
        ({"same_length": "memory_and_self", "clamp_len": 9}, {"same_length": "memory_and_self", "clamp_len": 9}),
        ({"zero_memory": True}, {"zeros": True}),
        ({"zero_memory": True, "same_length": "memory"}, {"zeros": True, "same_length": "memory"}),
        ({"memory_len": 0, "overlap_len": 7}, {"memory_len": 0, "overlap_len": 7}),
        ({"memory_len": 0, "overlap_len": 50}, {"memory_len": 0, "overlap_len": 50}),
    ],
    ids=str,
)
def test_an_override_scores_the_same_weights_in_another_way(
    made: Made, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    result = evaluated(made, **changes)["model"]
    assert result["tokens"] == made.corpus.split("valid").tokens - 1
    assert result["loss"] == pytest.approx(naive_loss(made, **expected), rel=1e-5)
    if changes:
        assert abs(result["loss"] - naive_loss(made)) > 1e-4, "it makes a difference"


@pytest.mark.parametrize("num_lanes", [1, 3])
def test_the_accuracy_is_the_share_of_targets_that_the_whole_distribution_puts_first(
    made: Made, num_lanes: int
) -> None:
    model = TransformerXL(tiny_section(init_std=0.2, **made.settings), vocab_size=made.corpus.vocab_size).eval()
    model.load_state_dict(made.weights, strict=False)
    tokens_S = torch.from_numpy(made.corpus.split("valid").read_all().astype(np.int64))
    stripe_len = math.ceil((len(tokens_S) - 1) / num_lanes)
    hits = 0
    with torch.no_grad():
        for begin in range(0, len(tokens_S) - 1, stripe_len):
            stripe_1S = tokens_S[None, begin : begin + stripe_len + 1]
            hidden_BTD, _ = model(stripe_1S[:, :-1], model.empty_memory(num_lanes=1, memory_len=0))
            hits += int((model.softmax(hidden_BTD, None).argmax(-1) == stripe_1S[0, 1:]).sum())
    result = evaluated(made, accuracy=True, num_lanes=num_lanes, memory_len=stripe_len, segment_len=9)["model"]
    assert result["accuracy_pct"] == pytest.approx(100 * hits / (len(tokens_S) - 1))
    assert "accuracy_pct" not in evaluated(made, num_lanes=num_lanes)["model"]


def test_memory_off_is_scored_beside_the_model(made: Made) -> None:
    results = evaluated(made, without_memory=True, zero_memory=True)
    assert results["model"]["loss"] == pytest.approx(naive_loss(made, zeros=True), rel=1e-5)
    assert results["memory off"]["loss"] == pytest.approx(naive_loss(made, memory_len=0), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero_memory": True, "memory_len": 0}, "--zero-memory needs a memory"),
        ({"same_length": "memory", "memory_len": 0}, "Give --same-length off"),
        ({"same_length": "memory_and_self", "without_memory": True}, "Give --same-length off"),
        ({"overlap_len": 8}, "eval.overlap_len=8 .* eval.memory_len=0"),
        ({"overlap_len": -1}, "--overlap-len -1: it must be 0 to 1,048,576 tokens"),
    ],
    ids=str,
)
def test_overrides_that_contradict_each_other_are_refused(made: Made, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluated(made, **changes)


def test_a_zero_memory_is_refused_by_a_model_with_document_masks(tmp_path: Path) -> None:
    made = make(tmp_path, document_mask=True)
    with pytest.raises(ConfigError, match="--zero-memory cannot be used with this model"):
        evaluated(made, zero_memory=True)


def test_the_cost_of_text_is_the_same_with_document_masks_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents of one random character: whoever knows no more than that pays log2(62) bits for each byte."""
    letters = string.ascii_letters + string.digits
    texts = random.Random(1).choices(letters, k=400)
    for document_mask in (False, True):
        made = make(tmp_path / str(document_mask), document_mask=document_mask, texts=texts)
        end = made.corpus.end_of_text

        def losses(
            frozen: FrozenModel, hidden: Tensor, targets_BT: Tensor, end: int | None = end, **rest: Any
        ) -> Tensor:
            return torch.where(targets_BT == end, 0.0, math.log(62))

        monkeypatch.setattr(FrozenModel, "losses", losses)
        for num_lanes in (1, 3):
            result = evaluated(made, num_lanes=num_lanes)["model"]
            assert result["tokens"] == made.corpus.split("valid").tokens - 1
            assert result["bits_per_byte"] == pytest.approx(math.log2(62), rel=0.01)


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_bits_of_the_text_are_those_of_the_formula_in_the_documentation(tmp_path: Path, kind: str) -> None:
    """From the tokens' log-probabilities, the held-out texts as they are, and the page's own words."""
    page = (Path(__file__).parents[3] / "docs" / "evaluating.md").read_text(encoding="utf-8")
    assert "loss / ln 2 * tokens of the split / bytes (characters) of its text" in page
    assert "exp(loss * tokens of the split / words)" in page
    texts = ["\u00e4\u4e16 the cat sat\n" * (3 + number) for number in range(12)]
    made = make(tmp_path, texts=texts, kind=kind, vocab_size=280 if kind == "bpe" else 0)
    result = evaluated(made, num_lanes=3, log_probs=tmp_path / "scores.npz")["model"]
    log_p = np.load(tmp_path / "scores.npz")["log_p"].astype(np.float64)
    split, tokenizer = made.corpus.split("valid"), made.corpus.tokenizer
    documents = [document.tolist() for document in split.each_document()]
    held_out = [tokenizer.decode([i for i in ids if i != made.corpus.end_of_text]) for ids in documents]
    assert held_out
    assert set(held_out) <= set(texts)
    loss, num_tokens = -log_p.mean(), sum(map(len, documents))
    assert (len(log_p), result["tokens"]) == (num_tokens - 1, num_tokens - 1)
    num_bytes, num_characters = sum(len(text.encode()) for text in held_out), sum(map(len, held_out))
    assert num_bytes > num_characters
    assert result["bits_per_byte"] == pytest.approx(loss / math.log(2) * num_tokens / num_bytes, rel=1e-6)
    assert result["bits_per_character"] == pytest.approx(loss / math.log(2) * num_tokens / num_characters, rel=1e-6)
    num_words = sum(len(text.split()) + 1 for text in held_out)
    assert (result["words"], result["word_ppl"]) == (
        num_words,
        pytest.approx(math.exp(loss * num_tokens / num_words), rel=1e-5),
    )


@pytest.mark.parametrize("num_lanes", [1, 4])
def test_a_masked_evaluation_scores_each_document_as_if_it_stood_alone_behind_an_end_of_text(
    tmp_path: Path, num_lanes: int
) -> None:
    made = make(tmp_path, document_mask=True, texts=["ab" * i + "c" for i in range(1, 25)])
    longest = made.corpus.split("valid").longest
    result = evaluated(made, num_lanes=num_lanes, memory_len=longest)["model"]
    documents = [[int(i) for i in document] for document in made.corpus.split("valid").each_document()]
    assert all(document[-1] == made.corpus.end_of_text for document in documents)
    model = TransformerXL(tiny_section(init_std=0.2, **made.settings), vocab_size=made.corpus.vocab_size).eval()
    model.load_state_dict(made.weights, strict=False)
    nats = 0.0
    for number, document in enumerate(documents):
        tokens = torch.tensor([[made.corpus.end_of_text, *document] if number else document])
        nats -= float(log_probabilities(model, tokens, segment_len=len(document) + 1, memory_len=0).double().sum())
    expected = nats / (made.corpus.split("valid").tokens - 1)
    if num_lanes == 1:
        assert result["loss"] == pytest.approx(expected, rel=1e-5)
    else:
        assert result["loss"] != pytest.approx(expected, rel=1e-5), "a lane begins with an empty memory"


def test_where_a_tokenizer_loses_text_perplexity_is_told_with_the_reason(tmp_path: Path) -> None:
    made = make(tmp_path, texts=[f"the cat sat on mat {i} of {'many ' * i}" for i in range(40)], kind="word",
                vocab_size=9)  # fmt: skip
    lines = evaluate_trained(
        made.bundle, data=made.corpus.folder, overrides=Overrides(num_lanes=2), baselines=True,
        outputs=Outputs(json=tmp_path / "out.json"),
    )  # fmt: skip
    assert "ppl/word" in lines[1]
    assert "bits" not in lines[1]
    assert any(line.startswith("no bits per byte: ") and "(word)" in line for line in lines)
    assert any(line.startswith("unknown: ") for line in lines)
    results = json.loads((tmp_path / "out.json").read_text())
    assert [name.split(" (")[0] for name in results] == ["model", "order 0", "bigram"]
    for values in results.values():
        assert "bits_per_byte" not in values
        assert "does not restore" in values["no_bits"]


def test_an_attended_memory_differs_from_an_empty_one_in_what_is_visible_only() -> None:
    empty = empty_memory([4, 4], num_lanes=3, width=5, like=torch.empty(0))
    zeros = attended(empty)
    assert torch.equal(torch.stack(zeros.hidden), torch.zeros(2, 3, 4, 5))
    document_BT = torch.zeros(3, 2, dtype=torch.int64)
    assert not build_mask(empty, document_BT).mask()[:, :, :4].any()
    assert build_mask(zeros, document_BT).mask()[:, :, :4].all()
    assert torch.equal(build_mask(zeros, document_BT).mask()[:, :, 4:], build_mask(empty, document_BT).mask()[:, :, 4:])


def test_several_memories_are_one_table_of_what_each_alone_would_give(made: Made) -> None:
    results = evaluated(made, memory_len=(0, 8, 40), without_memory=True)
    assert list(results) == ["memory 0", "memory 8", "memory 40", "memory off"]
    for name, memory_len in (("memory 0", 0), ("memory 8", 8), ("memory 40", 40), ("memory off", 0)):
        alone = evaluated(made, memory_len=memory_len)["model"]
        assert results[name]["memory_len"] == alone["memory_len"] == memory_len
        assert results[name]["loss"] == alone["loss"]


def test_a_memory_longer_than_a_lane_is_cut_to_it_with_a_word_and_scores_the_same(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = made.corpus.split("valid").tokens - 1
    result = evaluated(made, memory_len=10**6)["model"]
    assert result["memory_len"] == targets
    assert result["loss"] == pytest.approx(naive_loss(made, memory_len=targets), rel=1e-5)
    assert f"the memory of {10**6:,} tokens is reduced to this number." in capsys.readouterr().err
    result = evaluated(made, memory_len=10**6, num_lanes=3)["model"]
    assert result["memory_len"] == -(-targets // 3)
    assert "With --num-lanes 1 the lane is longer" in capsys.readouterr().err
    evaluated(made, memory_len=targets)
    assert "is reduced" not in capsys.readouterr().err


def test_segments_longer_than_a_lane_and_more_lanes_than_targets_score_the_same_with_a_word(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = made.corpus.split("valid").tokens - 1
    whole, single = evaluated(made, segment_len=targets), evaluated(made, num_lanes=targets, memory_len=1)
    assert "is reduced to this number" not in capsys.readouterr().err
    assert evaluated(made, segment_len=1 << 20)["model"]["loss"] == whole["model"]["loss"]
    said = capsys.readouterr().err
    assert (
        f"a lane of split 'valid' has {targets:,} tokens, so --segment-len {1 << 20:,} is reduced to this number"
        in said
    )
    assert evaluated(made, num_lanes=1 << 20, memory_len=1)["model"]["loss"] == single["model"]["loss"]
    assert (
        f"has {targets:,} tokens to score, so --num-lanes {1 << 20:,} is reduced to this number"
        in capsys.readouterr().err
    )


def test_the_lanes_that_are_told_are_those_that_were_run(made: Made) -> None:
    overrides, targets = Overrides(num_lanes=1 << 20, memory_len=(1,)), made.corpus.split("valid").tokens - 1
    lines = evaluate_trained(
        made.bundle, data=made.corpus.folder, overrides=overrides, baselines=False, outputs=Outputs()
    )
    assert lines[0].endswith(f", as {targets} lanes")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 9 TiB"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 TiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp]\nDefaultCPUAllocator: can't allocate memory: error code 12"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_evaluation_without_enough_memory_is_one_line_with_the_remedy(
    made: Made, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FrozenModel, "run", Mock(side_effect=error))
    with pytest.raises(ConfigError, match=r"not enough memory for this evaluation: .*Give fewer lanes") as told:
        evaluated(made)
    assert "\n" not in str(told.value)


def test_an_error_that_is_none_of_memory_stays_what_it_is(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrozenModel, "run", Mock(side_effect=RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        evaluated(made)
    torch.distributed.destroy_process_group()  # which a defect leaves behind, as the process ends with it


def test_a_bundle_without_a_corpus_is_refused_as_a_wrong_call(made: Made) -> None:
    with pytest.raises(ConfigError, match="is a bundle, and a bundle names no corpus"):
        evaluate_trained(made.bundle, data="", overrides=Overrides(), baselines=False, outputs=Outputs())


def test_what_all_ranks_know_is_said_by_rank_0_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make(tmp_path, document_mask=True, begins_documents=False)
    scores = Scores(
        {
            "model": {
                "loss": 1.0,
                "tokens": 1.0,
                "by_cluster": [],
                "by_position": [{"first": 0, "last": 0, "loss": 1.0, "tokens": 1}],
            }
        },
        None,
    )
    monkeypatch.setattr("txl_dist.evaluation.evaluate.score_model", Mock(return_value=scores))
    for rank, is_said in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        evaluate_trained(
            made.bundle, data=made.corpus.folder, overrides=Overrides(), baselines=False, outputs=Outputs()
        )
        assert ("did not train on the first token of a document" in capsys.readouterr().err) == is_said


def test_attended_zeros_are_as_many_as_asked_for(made: Made) -> None:
    targets = made.corpus.split("valid").tokens - 1
    result = evaluated(made, memory_len=targets + 9, zero_memory=True)["model"]
    assert result["memory_len"] == targets + 9
    assert result["loss"] == pytest.approx(naive_loss(made, memory_len=targets + 9, zeros=True), rel=1e-5)


def test_a_bar_with_the_time_left_is_shown_on_a_terminal_and_lines_now_and_then_elsewhere(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(Progress, "_show_bar", lambda self: lines.append(self.line()))
    monkeypatch.setattr("txl_dist.console.progress._QUIET_S", 0.0)
    evaluated(made)
    assert lines == []
    assert "scoring" not in capsys.readouterr().err
    monkeypatch.setattr("txl_dist.evaluation.scoring.TELL_EVERY_S", 0.0)
    evaluated(made)
    assert re.search(r"scoring: [\d,]+ of [\d,]+ tokens, \d+ %, .* left", capsys.readouterr().err)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    evaluated(made, memory_len=(0, 8))
    passes = -(-(made.corpus.split("valid").tokens - 1) // SEGMENT_LEN)
    assert len(lines) == 2 * passes
    assert re.fullmatch(r"scoring: [\d,]+ of [\d,]+ tokens, 100 %, [\d,.]+ tokens/s, 0:00:00 left", lines[-1])


def test_a_masked_model_that_never_learnt_first_tokens_is_scored_on_them_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {}
    for begins in (True, False):
        evaluated(make(tmp_path / str(begins), document_mask=True, begins_documents=begins))
        said[begins] = "did not train on the first token of a document" in capsys.readouterr().err
    assert said == {True: False, False: True}


def test_on_one_lane_any_segment_length_costs_the_same_with_memory_long_enough(made: Made) -> None:
    targets = made.corpus.split("valid").tokens - 1
    results = evaluated(made, segment_len=(1, 7, 16, 50, targets), memory_len=targets)
    losses = [values["loss"] for values in results.values()]
    assert len(losses) == 5
    assert max(losses) - min(losses) < 1e-5


def test_a_sweep_has_a_row_for_each_combination_of_what_that_alone_would_give(made: Made) -> None:
    results = evaluated(made, memory_len=(8, 24), segment_len=(5, 16), clamp_len=(0, 6))
    assert list(results) == [
        f"memory {memory}, segment {segment}, clamp {clamp}"
        for clamp in (0, 6)
        for segment in (5, 16)
        for memory in (8, 24)
    ]
    assert len({values["loss"] for values in results.values()}) == 8
    for values in results.values():
        lengths = {name: values[name] for name in ("memory_len", "segment_len", "clamp_len")}
        assert evaluated(made, **lengths)["model"]["loss"] == values["loss"]


def test_a_sweep_is_drawn_as_a_png(made: Made, tmp_path: Path) -> None:
    overrides = Overrides(num_lanes=4, memory_len=(0, 8), segment_len=(5, 16))
    outputs = Outputs(plot=tmp_path / "sweep.png")
    evaluate_trained(made.bundle, data=made.corpus.folder, overrides=overrides, baselines=False, outputs=outputs)
    picture = (tmp_path / "sweep.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 5000


def test_rows_that_come_to_the_same_are_scored_once_with_a_word(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    targets, run, tokens = made.corpus.split("valid").tokens - 1, FrozenModel.run, []

    def counted(frozen: FrozenModel, tokens_BT: Tensor, *rest: Any, **named: Any) -> Tensor:
        tokens.append(tokens_BT.numel())
        return run(frozen, tokens_BT, *rest, **named)

    monkeypatch.setattr(FrozenModel, "run", counted)
    results = evaluated(made, memory_len=(0, 10**4, targets, 10**5), segment_len=(SEGMENT_LEN, 0), without_memory=True)
    assert list(results) == [
        f"memory 0, segment {SEGMENT_LEN}",
        f"memory {targets}, segment {SEGMENT_LEN}",
        "memory off",
    ]
    assert results["memory off"]["loss"] == results[f"memory 0, segment {SEGMENT_LEN}"]["loss"]
    assert sum(tokens) == 2 * -(-targets // SEGMENT_LEN) * SEGMENT_LEN
    assert "6 of 9 rows have the same settings as other rows, and are not scored again" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [{"memory_len": (10**4, 10**5)}, {"segment_len": (0, SEGMENT_LEN), "without_memory": True},
     {"protocol": "nanogpt", "memory_len": (0, -1)}],
    ids=str,
)  # fmt: skip
def test_a_picture_of_one_length_is_refused_before_it_is_scored(
    made: Made,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
) -> None:
    monkeypatch.setattr(FrozenModel, "run", Mock(side_effect=AssertionError("it is scored")))
    with pytest.raises(
        ConfigError,
        match=r"--plot draws .* all result in the same evaluation: .*Give other lengths, or remove --plot",
    ):
        evaluate_trained(
            made.bundle, data=made.corpus.folder, overrides=Overrides(**changes), baselines=False,
            outputs=Outputs(plot=tmp_path / "p.png"),
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []
    assert "the same settings as other rows" not in capsys.readouterr().err


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize("lengths", [{"memory_len": 24}, {"memory_len": 0, "overlap_len": 5}], ids=str)
def test_log_probabilities_are_those_of_each_scored_token_in_the_order_of_the_corpus(
    tmp_path: Path, document_mask: bool, lengths: dict[str, int]
) -> None:
    made, found = make(tmp_path, document_mask=document_mask), {}
    split = made.corpus.split("valid")
    for name in ("p.npz", "p.jsonl"):
        result = evaluated(made, num_lanes=3, log_probs=tmp_path / name, **lengths)["model"]
        if name.endswith("npz"):
            loaded = np.load(tmp_path / name, allow_pickle=False)
            found[name] = {key: loaded[key].tolist() for key in ("token", "log_p", "document")}
        else:
            rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
            found[name] = {key: [row[key] for row in rows] for key in ("token", "log_p", "document")}
        assert -np.mean(found[name]["log_p"]) == pytest.approx(result["loss"], abs=1e-6)
    assert found["p.npz"] == found["p.jsonl"]
    assert found["p.npz"]["token"] == split.read_all()[1:].tolist()
    documents = [number for number, document in enumerate(split.each_document()) for _ in document]
    assert found["p.npz"]["document"] == documents[1:]


def test_parts_of_the_loss_count_every_target_once_and_average_to_it(tmp_path: Path) -> None:
    made = make(tmp_path, cutoffs=[5, 60], kind="byte")
    result: dict[str, Any] = evaluated(made, num_lanes=3)["model"]
    for name in ("by_cluster", "by_position"):
        parts = result[name]
        assert sum(part["tokens"] for part in parts) == result["tokens"]
        mean = sum((part["loss"] or 0.0) * part["tokens"] for part in parts) / result["tokens"]
        assert mean == pytest.approx(result["loss"], abs=1e-6)
        assert [part["first"] for part in parts] == [0, *(part["last"] + 1 for part in parts[:-1])]
    assert [part["first"] for part in result["by_cluster"]] == [0, 5, 60]
    assert len(result["by_position"]) == SEGMENT_LEN


def test_perplexity_per_word_is_nats_of_all_tokens_over_words_and_ends(tmp_path: Path) -> None:
    texts = [f"the cat  sat on\nmat {i} of {'many ' * i}" for i in range(40)]
    made = make(tmp_path, texts=texts, kind="bpe", vocab_size=300)
    split, result = made.corpus.split("valid"), evaluated(made)["model"]
    held_out = [
        made.corpus.tokenizer.decode(document[:-1].tolist()) for document in split.each_document()
    ]  # each ends with end-of-text
    words = sum(len(text.split()) + 1 for text in held_out)
    assert set(held_out) <= set(texts)
    assert result["words"] == words
    assert result["word_ppl"] == pytest.approx(math.exp(result["loss"] * split.tokens / words))


def test_positions_that_know_no_memory_are_scored_by_the_plain_model(tmp_path: Path) -> None:
    """Whose last segment is as long as the others: they count their places from its end."""
    made = make(tmp_path, positions="absolute", memory_len=0)
    tokens = made.corpus.split("valid").read_all().astype(np.int64)
    padded = torch.from_numpy(np.pad(tokens, (0, -(len(tokens) - 1) % SEGMENT_LEN)))
    rows_BT, targets_BT = padded[:-1].view(-1, SEGMENT_LEN), padded[1:].view(-1, SEGMENT_LEN)
    model = TransformerXL(tiny_section(init_std=0.2, **made.settings), vocab_size=made.corpus.vocab_size).eval()
    model.load_state_dict(made.weights, strict=False)
    with torch.no_grad():
        hidden_BTD, _ = model(rows_BT, model.empty_memory(num_lanes=len(rows_BT), memory_len=0))
        expected = model.softmax(hidden_BTD, targets_BT).flatten()[: len(tokens) - 1].double().mean()
    assert evaluated(made)["model"]["loss"] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("zero_memory", [False, True])
def test_absolute_positions_that_were_allowed_a_memory_are_scored_with_it(tmp_path: Path, zero_memory: bool) -> None:
    made = make(tmp_path, positions="absolute", absolute_with_memory=True)
    tokens = made.corpus.split("valid").read_all().astype(np.int64)
    padded = torch.from_numpy(np.pad(tokens, (0, -(len(tokens) - 1) % SEGMENT_LEN)))[None]
    model = TransformerXL(tiny_section(init_std=0.2, **made.settings), vocab_size=made.corpus.vocab_size).eval()
    model.load_state_dict(made.weights, strict=False)
    lengths = {"segment_len": SEGMENT_LEN, "memory_len": MEMORY_LEN}
    scores = log_probabilities(model, padded, **lengths, zero_memory=zero_memory)[0, : len(tokens) - 1]
    result = evaluated(made, zero_memory=zero_memory)["model"]
    assert result["loss"] == pytest.approx(-float(scores.double().mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("outputs", "changes", "message"),
    [
        ({"log_probs": "p.txt"}, {}, r"--log-probs .*p.txt: the file name must end in .npz or .jsonl"),
        (
            {"log_probs": "none/p.npz"},
            {},
            "cannot write .*p.npz: No such file or directory. Name another .*--log-probs",
        ),
        ({"log_probs": "p.npz"}, {"memory_len": (0, 8)}, "--log-probs needs one evaluation"),
        ({"log_probs": "p.npz"}, {"without_memory": True}, "--log-probs needs one evaluation"),
        ({"log_probs": "p.npz"}, {"protocol": "original"}, "--log-probs needs one evaluation"),
        ({"plot": "p.png"}, {}, "--plot draws losses over several lengths"),
        ({"plot": "p.svg"}, {"memory_len": (0, 8)}, "--plot .*p.svg: the file name must end in .png"),
        ({"plot": "none/p.png"}, {"memory_len": (0, 8)}, "cannot write .*p.png"),
        ({"json": "none/p.json"}, {}, "cannot write .*p.json"),
    ],
    ids=str,
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_read(
    tmp_path: Path, outputs: dict[str, str], changes: dict[str, Any], message: str
) -> None:
    paths = {name: tmp_path / file for name, file in outputs.items()}
    with pytest.raises(ConfigError, match=message):
        evaluate_trained(
            tmp_path / "nothing", data="x", overrides=Overrides(**changes), baselines=False, outputs=Outputs(**paths)
        )
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_not_opened_before_there_is_something_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader would see it end; without one yet, the look would wait."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(Path, "open", Mock(side_effect=AssertionError("it is opened")))
    Outputs(json=tmp_path / "pipe").check(Overrides())


def test_what_does_not_belong_together_or_is_not_whole_is_refused_before_it_is_scored(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FrozenModel, "run", Mock(side_effect=AssertionError("it is scored")))
    other = make(tmp_path / "other", kind="bpe", vocab_size=270)
    with pytest.raises(DataError, match=r"was prepared with another tokenizer than .*--tokenizer-file"):
        evaluated(made._replace(corpus=other.corpus))
    for damage in ("cut", "gone", "of other weights"):
        folder = tmp_path / damage
        shutil.copytree(made.bundle, folder / "bundle")
        weights = folder / "bundle" / "model.safetensors"
        if damage == "cut":
            weights.write_bytes(weights.read_bytes()[:-100])
        elif damage == "gone":
            weights.unlink()
        else:
            weights.write_bytes((other.bundle / "model.safetensors").read_bytes())
        with pytest.raises(CheckpointError) as told:
            evaluated(made._replace(bundle=folder / "bundle"))
        assert "model.safetensors" in str(told.value)
        assert not (folder / "result.json").exists()


def test_a_picture_has_the_first_length_that_differs_along_its_axis_and_a_line_for_each_of_the_others() -> None:
    scores = {
        f"{memory} {segment}": {"memory_len": memory, "segment_len": segment, "clamp_len": 0, "loss": memory + segment}
        for memory in (8, 0)
        for segment in (16, 32)
    }
    chart = chart_over_lengths({"order 0": {"loss": 9.0}, **scores})
    assert chart is not None
    assert chart.x_label == "tokens of memory"
    assert {line.label: (line.x.tolist(), line.y.tolist()) for line in chart.lines} == {
        "segment 16": ([0, 8], [16, 24]),
        "segment 32": ([0, 8], [32, 40]),
    }
    alone = chart_over_lengths({name: one for name, one in scores.items() if one["memory_len"]})
    assert alone is not None
    assert (alone.x_label, [line.label for line in alone.lines]) == ("tokens of segment", [""])
    assert chart_over_lengths({"model": {"memory_len": 8, "loss": 1.0}, "order 0": {"loss": 2.0}}) is None


@pytest.mark.parametrize("has_bf16", [True, False])
def test_an_evaluation_in_bf16_is_near_that_in_fp32_and_warns_where_bf16_is_emulated(
    made: Made, has_bf16: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if has_bf16:
        monkeypatch.setattr(precision_file, "bf16_support", lambda device: Bf16Support(True, "AMX"))
    else:
        monkeypatch.setattr(precision_file, "bf16_instructions", lambda: "")
    loss = evaluated(made)["model"]["loss"]
    assert evaluated(made, precision="fp32")["model"]["loss"] == loss
    assert "in bf16" not in capsys.readouterr().err
    in_bf16 = evaluated(made, precision="bf16")["model"]["loss"]
    assert 0 < abs(in_bf16 - loss) <= 0.02 * loss
    assert ("inference in bf16 is slower than in fp32 here" in capsys.readouterr().err) is not has_bf16


def test_the_json_file_says_in_which_precision_each_score_was_computed(tmp_path: Path) -> None:
    made = make(tmp_path)
    content = load_bundle(made.bundle)
    for dtype, precision, found in (
        ("fp32", "stored", "fp32"),
        ("bf16", "stored", "bf16"),
        ("fp16", "stored", "fp16"),
        ("int8", "stored", "fp32"),
        ("fp32", "bf16", "bf16"),
        ("bf16", "fp32", "fp32"),
    ):
        write_bundle(tmp_path / dtype, content, dtype=dtype)
        scores = evaluated(made._replace(bundle=tmp_path / dtype), precision=precision, without_memory=True)
        assert {name: score["precision"] for name, score in scores.items()} == {"model": found, MEMORY_OFF: found}


def test_the_line_of_the_model_names_a_precision_that_was_asked_for(tmp_path: Path) -> None:
    made = make(tmp_path)
    cases: list[tuple[InferencePrecision, str]] = [("fp32", ", in fp32, as 1 lane"), ("stored", ", as 1 lane")]
    for precision, words in cases:
        overrides = Overrides(num_lanes=1, precision=precision)
        lines = evaluate_trained(
            made.bundle, data=made.corpus.folder, overrides=overrides, baselines=False, outputs=Outputs()
        )
        assert lines[0].endswith(words)
        assert (", in " in lines[0]) is (precision != "stored")
