"""The relative effective context length, compared with the paper's equations and with losses of single tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.bundles import MEMORY_LEN, SEGMENT_LEN, Made, make
from tests.helpers.models import tiny_section
from txl_dist.cli.main import main
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.evaluation.options import ReclOutputs, ReclSettings
from txl_dist.evaluation.recl import compare_contexts, compute_recl, relative_gain
from txl_dist.evaluation.target import Target, open_target
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.train.engine import precision as precision_file
from txl_dist.train.engine.precision import Bf16Support

TEXTS = ["abcab" * 60 + "d" * i for i in range(24)]


def naive_recl(l: Any, contexts: list[int], i: int, r: float) -> int:  # noqa: E741
    """Appendix C of the paper, word by word; l[i][c][t] by index of context."""
    num_models, num_targets = len(l), len(l[0][0])

    def f(c: int, longer: int) -> float:
        b = [min(l[m][c][t] for m in range(num_models)) for t in range(num_targets)]
        hard = sorted(range(num_targets), key=lambda t: -b[t])[: round(r * num_targets)]
        return sum(min(b[t], l[i][longer][t]) for t in hard) / len(hard)

    c = 0
    while c + 1 < len(contexts):
        if (math.exp(f(c, c)) - math.exp(f(c, c + 1))) / math.exp(f(c, c)) < 0.01:
            return contexts[c]
        c += 1
    return contexts[c]


def random_losses(seed: int) -> Any:
    """Of three models, that fall by less and less with the context."""
    generator = np.random.default_rng(seed)
    falls = generator.uniform(0.0, 0.3, (3, 8, 1)) * 0.6 ** np.arange(8)[:, None]
    return 4.0 - falls.cumsum(axis=1) + generator.normal(0.0, 0.05, (3, 8, 40))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("r", [0.1, 0.5, 1.0])
def test_the_length_is_that_of_the_paper_written_out(seed: int, r: float) -> None:
    losses, contexts = random_losses(seed), list(range(100, 900, 100))
    for model in range(3):
        found = compute_recl(losses, contexts, model=model, r=r)
        assert found.context == naive_recl(losses.tolist(), contexts, model, r)
        assert len(found.gains) == 7


def test_a_model_alone_gains_by_its_own_perplexity() -> None:
    losses = np.array([[[2.0, 3.0], [1.5, 3.5], [1.5, 3.5]]])
    gain = relative_gain(losses, model=0, context=0, r=1.0)
    assert gain == pytest.approx(1 - math.exp((1.5 + 3.0) / 2 - 2.5)), "what got worse does not count"
    assert relative_gain(losses, model=0, context=0, r=0.5) == 0.0, "the hard half did not gain"
    assert compute_recl(losses, [10, 20, 30], model=0, r=1.0)[:2] == (20, False)
    assert compute_recl(losses, [10, 20, 30], model=0, r=0.5)[:2] == (10, False)
    still = compute_recl(losses[:, :2], [10, 20], model=0, r=1.0)
    assert still[:2] == (20, True)
    assert str(still) == "20 or more"


def test_a_worse_model_gains_only_where_it_beats_the_group() -> None:
    strong, weak = [[2.0], [2.0]], [[9.0], [5.0]]
    assert relative_gain(np.array([weak]), model=0, context=0, r=1.0) > 0.9
    assert relative_gain(np.array([strong, weak]), model=1, context=0, r=1.0) == 0.0


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> list[Made]:
    folder = tmp_path_factory.mktemp("recl")
    return [
        make(folder / "recurrent", texts=TEXTS),
        make(folder / "clamped", texts=TEXTS, clamp_len=9, same_length="memory"),
        make(folder / "absolute", texts=TEXTS, positions="absolute", memory_len=0),
        make(folder / "remembering", texts=TEXTS, positions="absolute", absolute_with_memory=True),
    ]


SMALL = {"step": 10, "max_context": 45, "num_tokens": 12, "num_lanes": 5}


def measured(group: list[Made], tmp_path: Path, **changes: Any) -> tuple[dict[str, Any], list[str]]:
    lines = compare_contexts(
        [made.bundle for made in group],
        data=group[0].corpus.folder,
        settings=ReclSettings(**{**SMALL, **changes}),
        outputs=ReclOutputs(json=tmp_path / "out.json", plot=tmp_path / "out.png"),
    )
    return json.loads((tmp_path / "out.json").read_text()), lines


def is_vanilla(made: Made) -> bool:
    """Without any memory."""
    return made.settings.get("positions") == "absolute" and not made.settings.get("absolute_with_memory")


@torch.no_grad()
def naive_loss(made: Made, piece: Any, *, context: int, memory_len: int) -> float:
    """Of the last token of a piece, by the plain model, in segments that end at it."""
    model = TransformerXL(tiny_section(init_std=0.2, **made.settings), vocab_size=made.corpus.vocab_size).eval()
    model.load_state_dict(made.weights, strict=False)
    if is_vanilla(made):
        context = min(context, SEGMENT_LEN)
    tokens = torch.from_numpy(piece[-context - 1 :].astype(np.int64))[None]
    memory = model.empty_memory(num_lanes=1, memory_len=memory_len)
    stops = sorted(range(context, 0, -SEGMENT_LEN))
    for start, stop in zip([0, *stops], stops, strict=False):
        hidden, memory = model(tokens[:, start:stop], memory)
    return float(model.softmax(hidden[:, -1:], tokens[:, -1:]))


@pytest.mark.parametrize("memory_len", [-1, 60])
def test_each_loss_is_that_of_a_target_behind_exactly_so_many_tokens(
    group: list[Made], tmp_path: Path, memory_len: int
) -> None:
    found, lines = measured(group, tmp_path, memory_len=memory_len)
    assert found["contexts"] == [10, 20, 30, 40]
    tokens = group[0].corpus.split("valid").read_all()
    starts = np.sort(np.random.default_rng(0).choice(len(tokens) - 45, 12, replace=False))
    pieces = [tokens[start : start + 46] for start in starts]
    losses = []
    for made, row in zip(group, found["models"], strict=True):
        lengths = 0 if is_vanilla(made) else MEMORY_LEN if memory_len < 0 else memory_len
        expected = [
            [naive_loss(made, piece, context=context, memory_len=lengths) for piece in pieces]
            for context in found["contexts"]
        ]
        assert row["loss"] == pytest.approx(np.mean(expected, axis=1), abs=1e-5)
        losses.append(expected)
    for index, row in enumerate(found["models"]):
        for r in (0.5, 1.0):
            assert row["recl"][f"{r:g}"]["context"] == naive_recl(losses, found["contexts"], index, r)
    assert [line.removeprefix("scored: ") for line in lines[:4]] == [row["scored"] for row in found["models"]]
    assert [row["scored"] for row in found["models"]] == [f"{made.bundle}, step 1" for made in group]
    assert lines[4].startswith("12 targets of corpus (valid), contexts of 10 to 40 tokens in steps of 10")
    assert len(lines) == 10
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("has_bf16", [True, False])
def test_losses_in_bf16_are_near_those_in_fp32_and_a_device_that_emulates_bf16_is_named(
    group: list[Made],
    tmp_path: Path,
    has_bf16: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(precision_file, "bf16_support", lambda device: Bf16Support(has_bf16, "a test"))
    stored, _ = measured(group, tmp_path)
    fp32, _ = measured(group, tmp_path, precision="fp32")
    assert fp32 == stored
    assert "in bf16" not in capsys.readouterr().err
    bf16, lines = measured(group, tmp_path, precision="bf16")
    for row, in_bf16 in zip(fp32["models"], bf16["models"], strict=True):
        assert (row["precision"], in_bf16["precision"]) == ("fp32", "bf16")
        assert row["loss"] != in_bf16["loss"]
        assert in_bf16["loss"] == pytest.approx(row["loss"], rel=0.02)
    assert lines[0] == f"scored: {bf16['models'][0]['scored']}, in bf16"
    num_warnings = capsys.readouterr().err.count("inference in bf16 is slower than in fp32 here")
    assert num_warnings == (0 if has_bf16 else 1)


def test_the_draw_is_a_seed_s_and_cut_to_the_split(
    group: list[Made], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, again, other = (measured(group[:1], tmp_path, seed=seed)[0] for seed in (1, 1, 2))
    assert first == again != other
    split = group[0].corpus.split("valid")
    found, _ = measured(group[:1], tmp_path, max_context=split.tokens - 3, step=split.tokens // 3, num_lanes=2)
    assert found["targets"] == 3
    assert "fewer than --num-tokens 12" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 0}, "--step 0: it must be 1 to 1,048,576 tokens"),
        ({"max_context": 15}, "--max-context 15: it must be at least twice --step 10 .tokens."),
        ({"r": (0.5, 1.5)}, "--r 0.5 1.5: each share of the targets must be above 0 and at most 1"),
        ({"r": ()}, "--r : each share of the targets must be"),
        ({"num_tokens": 0}, "--num-tokens 0: it must be 1 to"),
        ({"max_context": 10**5}, "must have more than --max-context 100000"),
        ({"split": "test"}, "has no split 'test' to score"),
    ],
    ids=str,
)
def test_what_measures_nothing_is_refused(
    group: list[Made], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        measured(group[:1], tmp_path, **changes)


def test_models_of_other_tokenizers_or_with_document_masks_are_refused(group: list[Made], tmp_path: Path) -> None:
    other = make(tmp_path / "other", texts=TEXTS, kind="bpe", vocab_size=270)
    with pytest.raises(ConfigError, match="have different tokenizers"):
        measured([group[0], other], tmp_path)
    masked = make(tmp_path / "masked", texts=TEXTS, document_mask=True)
    with pytest.raises(ConfigError, match="a query attends only within its document"):
        measured([masked], tmp_path)


@pytest.mark.parametrize("same_length", ["memory", "memory_and_self"])
def test_a_window_that_is_counted_in_memory_needs_one(tmp_path: Path, same_length: str) -> None:
    made = make(tmp_path / "made", texts=TEXTS, same_length=same_length)
    with pytest.raises(ConfigError, match=r"needs a memory, .* Give a --memory-len of 1 or more"):
        measured([made], tmp_path, memory_len=0)


def test_the_corpus_is_that_of_the_first_model_and_those_of_others_need_not_be_there(
    group: list[Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, corpus = [], group[0].corpus.folder

    def opened(path: Path, *, data: str | Path) -> Target:
        asked.append(str(data))
        return open_target(path, data=data or corpus)

    monkeypatch.setattr("txl_dist.evaluation.recl.open_target", opened)
    settings = ReclSettings(**SMALL)
    compare_contexts([made.bundle for made in group], data="", settings=settings, outputs=ReclOutputs())
    assert asked == ["", *[str(corpus)] * (len(group) - 1)]


def test_ranks_that_read_different_checkpoints_are_refused(
    group: list[Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txl_dist.evaluation.target.gather_objects", lambda own: [own, [own[0], "step_9"]])
    with pytest.raises(CheckpointError, match=r"the ranks read different models: .*step 1, step_9\. Name one"):
        measured(group[:2], tmp_path)


def test_the_command_needs_models_and_of_bundles_a_corpus(
    group: list[Made], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = str(group[0].bundle)
    for words, message in (
        ([], "txl recl: error: "),
        ([bundle], "is a bundle, and a bundle names no corpus. Name a corpus with --data"),
        ([bundle, "--step", "9", "--max-context", "9"], "at least twice"),
        ([str(tmp_path / "none")], "does not exist"),
        ([bundle, "--data", str(group[0].corpus.folder), "--plot", "x.svg"], "must end in .png"),
        ([bundle, "--data", str(group[0].corpus.folder), "--json", "none/x"], "cannot write none/x"),
        ([bundle, "--data", "x", "--json", "x.png", "--plot", "x.png"], "--json and --plot name the same file"),
    ):
        assert main(["recl", *words]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert "Traceback" not in said
