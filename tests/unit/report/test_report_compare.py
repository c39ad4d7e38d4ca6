"""The comparison of several runs: their differences, in a common unit."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.corpora import random_texts, tiny_corpus
from tests.helpers.made_runs import make_run, write_state
from txl_dist.cli.main import main
from txl_dist.config.load import Config, config_to_toml
from txl_dist.data.loader.bits_per_byte import text_units
from txl_dist.errors import ConfigError, DataError
from txl_dist.report.compare import Unit, unit_of, write_comparison
from txl_dist.report.summary import facts_of, read_run
from txl_dist.train.report.validation import text_facts


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [make_run(folder / "base", max_steps=500), make_run(folder / "fast", seed=3, lr=4e-3, max_steps=500)]


LOSSY = "mine (valid): the tokenizer (word) does not restore 3 of 4 documents byte for byte"


def tiny(
    folder: Path,
    *,
    bits: float | None,
    tokenizer: str = "",
    loss: float = 3.0,
    tokens: int = 900,
    first_tokens: int = 0,
    held_out_bytes: int | None = 4000,
    is_old: bool = False,
    document_mask: bool = False,
) -> Path:
    folder.mkdir(parents=True)
    facts = {"no_bits": {} if bits is not None else {"eval": LOSSY}, "held_out_bytes": held_out_bytes}
    start = {"kind": "event", "event": "start", "step": 0} | ({} if is_old else facts)
    record = {"kind": "eval", "step": 10, "loss": loss, "tokens": tokens}
    record |= {} if bits is None else {"bits_per_byte": bits}
    first = [record | {"step": 5, "loss": loss / 2, "tokens": first_tokens}] if first_tokens else []
    lines = [json.dumps(one) for one in (start, *first, record)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = Config.model_validate({"data": {"document_mask": document_mask}})
    (folder / "config.toml").write_text(config_to_toml(config), encoding="utf-8")
    if tokenizer:
        write_state(folder, step=10, tokenizer=tokenizer)
    return folder


def test_only_settings_that_differ_are_shown_the_runs_folder_aside(runs: list[Path], tmp_path: Path) -> None:
    write_comparison(runs, out=tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    rows = re.findall(
        r'<th scope="row">([a-z_]+\.[a-z_]+)</th><td class="\w+">(.*?)</td><td class="\w+">(.*?)</td>', html
    )
    assert rows == [("optim.lr", "0.002", "0.004")]
    assert html.count("<svg") == 7


def test_the_terminal_gets_a_line_per_run(runs: list[Path], tmp_path: Path) -> None:
    lines = write_comparison(runs, out=tmp_path / "page.html")
    assert [line.split()[0] for line in lines[:3]] == ["run", "base", "fast"]
    assert lines[3].startswith("All runs have the same tokenizer")
    assert lines[4].startswith("best validation loss, in nats per token: base ")
    assert lines[5] == f"page: {tmp_path / 'page.html'}"


def test_the_same_runs_give_the_same_bytes(runs: list[Path], tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_comparison(runs, out=tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("tokenizers", "bits", "column", "words"),
    [
        (("aa", "aa"), (1.0, 1.0), "loss", "same tokenizer"),
        (("aa", "bb"), (1.0, 1.0), "bits_per_byte", "different tokenizers"),
        (("aa", ""), (1.0, 1.0), "bits_per_byte", "do not show whether"),
        (("", ""), (1.0, 1.0), "bits_per_byte", "do not show whether"),
        (("aa", "bb"), (1.0, None), "", "r1: mine (valid): the tokenizer (word) does not restore 3 of 4 documents"),
    ],
)
def test_nats_are_compared_only_between_runs_of_one_tokenizer(
    tmp_path: Path, tokenizers: tuple[str, str], bits: tuple[float, float | None], column: str, words: str
) -> None:
    paths = [tiny(tmp_path / f"r{n}", bits=bits[n], tokenizer=tokenizers[n]) for n in range(2)]
    unit = unit_of([read_run(path) for path in paths])
    assert unit.column == column
    assert words in unit.sentence


def compared(tmp_path: Path, *runs: dict[str, Any]) -> tuple[Unit, list[str]]:
    """What is said of runs, and the lines for the terminal."""
    paths = [tiny(tmp_path / f"run{number}", **values) for number, values in enumerate(runs)]
    return unit_of([read_run(path) for path in paths]), write_comparison(paths, out=tmp_path / "page.html")


def test_runs_whose_losses_cannot_be_compared_are_not_put_side_by_side(tmp_path: Path) -> None:
    unit, lines = compared(
        tmp_path, {"bits": None, "tokenizer": "aa", "loss": 0.1}, {"bits": 1.9, "tokenizer": "bb", "loss": 3.0}
    )
    assert (unit.column, unit.is_fair) == ("", False)
    assert "the runs are not ranked" in lines[3]
    assert not any("best validation loss, in" in line for line in lines)
    assert "0.1000" not in "".join(lines)
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Training loss" not in html
    assert LOSSY in html


def test_a_run_that_is_better_in_bits_per_byte_is_ranked_first(tmp_path: Path) -> None:
    _, lines = compared(
        tmp_path, {"bits": 1.9, "tokenizer": "aa", "loss": 1.3}, {"bits": 1.2, "tokenizer": "bb", "loss": 3.0}
    )
    assert lines[4] == "best validation loss, in bits per byte: run1 1.2000, run0 1.9000"


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({}, {"tokens": 800}, "over different numbers of tokens, 800 and 900"),
        ({}, {"first_tokens": 300}, "over different numbers of tokens, 300 and 900"),
        (
            {"tokenizer": "bb"},
            {"held_out_bytes": None},
            "the records do not show how much of the validation split was scored (run1)",
        ),
        ({}, {"held_out_bytes": 5000}, "their validation splits differ: 4,000 and 5,000 bytes"),
        ({}, {"is_old": True, "document_mask": True}, "not all runs score the first tokens of documents"),
        ({"tokenizer": "bb"}, {"held_out_bytes": 5000}, "their validation splits differ"),
    ],
)
def test_losses_over_other_tokens_or_texts_are_said_to_be_so_and_not_ranked(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], words: str
) -> None:
    usual = {"bits": 1.0, "tokenizer": "aa"}
    unit, lines = compared(tmp_path, {**usual, **first}, {**usual, **second})
    assert not unit.is_fair
    assert words in lines[3]
    assert "not ranked" in lines[3]
    assert not any("best validation loss, in" in line for line in lines)


def test_a_run_that_scores_a_part_of_its_text_is_not_ranked_beside_one_of_another_tokenizer(tmp_path: Path) -> None:
    texts, paths = random_texts(count=60), []
    for kind, max_tokens in (("byte", 0), ("bpe", 100)):
        vocab_size = 300 if kind == "bpe" else 0
        split = tiny_corpus(tmp_path, name=kind, texts=texts, kind=kind, vocab_size=vocab_size).split("valid")
        scored = {"mask_documents": False, "max_tokens": max_tokens}
        bits = text_units([split], **scored).bits(2.0).get("bits_per_byte")
        path = tiny(tmp_path / f"run_{kind}", bits=bits, tokenizer=kind)
        start = {"kind": "event", "event": "start", "step": 0} | text_facts([split], {"eval": split}, **scored)
        lines = (path / "metrics.jsonl").read_text().splitlines()
        (path / "metrics.jsonl").write_text("\n".join([json.dumps(start), *lines[1:]]) + "\n")
        paths.append(path)
    unit = unit_of([read_run(path) for path in paths])
    assert not unit.is_fair
    assert "run_bpe: only the first 100 of the" in unit.sentence


def test_document_masks_of_today_are_compared_with_carrying(tmp_path: Path) -> None:
    usual = {"bits": 1.0, "tokenizer": "aa"}
    unit, _ = compared(tmp_path, usual, {**usual, "document_mask": True})
    assert unit.is_fair


def test_bits_that_an_older_program_recorded_without_a_look_at_its_text_do_not_count(tmp_path: Path) -> None:
    for is_old in (False, True):
        path = tiny(tmp_path / f"old {is_old}", bits=0.56, is_old=is_old, tokenizer="aa")
        assert read_run(path).history.evals["eval"].has("bits_per_byte") == (not is_old)


def test_a_report_says_why_there_are_no_bits_per_byte(tmp_path: Path) -> None:
    path = tiny(tmp_path / "run", bits=None)
    notes = {fact.name: fact.note for fact in facts_of(read_run(path))}
    assert f"no bits per byte: {LOSSY}" in notes["Validation loss"]


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    paths = [tiny(tmp_path / parent / "run", bits=1.0) for parent in ("a", "b")]
    lines = write_comparison(paths, out=tmp_path / "page.html")
    assert [line.split()[0] for line in lines[1:3]] == ["a/run", "b/run"]


def test_names_of_runs_are_text(tmp_path: Path) -> None:
    paths = [tiny(tmp_path / name, bits=1.0) for name in ("<script>", "$a$ & b")]
    write_comparison(paths, out=tmp_path / "page.html")
    assert "<script>" not in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_what_cannot_be_compared_is_refused(runs: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    with pytest.raises(ConfigError, match=r"1 run given.*txl report"):
        write_comparison(runs[:1], out=out)
    with pytest.raises(ConfigError, match=r"are the same run\. Name each run once"):
        write_comparison([runs[0], runs[1], runs[0] / ".." / "base"], out=out)
    with pytest.raises(DataError, match="no such folder"):
        write_comparison([runs[0], tmp_path / "nowhere"], out=out)
    with pytest.raises(ConfigError, match="Name another file with --out"):
        write_comparison(runs, out=tmp_path / "nowhere" / "page.html")
    assert not out.exists()


@pytest.mark.slow
def test_both_commands_answer_and_name_their_page(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(runs[0]), "--out", str(tmp_path / "r.html")]) == 0
    assert main(["compare", *map(str, runs), "--out", str(tmp_path / "c.html")]) == 0
    printed = capsys.readouterr().out
    for name in ("r.html", "c.html"):
        assert f"page: {tmp_path / name}" in printed
        assert (tmp_path / name).stat().st_size > 10_000
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err
