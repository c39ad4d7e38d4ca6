"""Several runs side by side: what differs, in a unit that can be compared."""

import json
import re
from pathlib import Path

import pytest

from tests.helpers.made_runs import make_run, write_state
from txl_dist.cli import main
from txl_dist.errors import ConfigError, DataError
from txl_dist.ops.compare import unit_of, write_comparison
from txl_dist.ops.summary import read_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [make_run(folder / "base", max_steps=500), make_run(folder / "fast", seed=3, lr=4e-3, max_steps=500)]


def tiny(folder: Path, *, bits: float | None, tokenizer: str = "") -> Path:
    folder.mkdir(parents=True)
    record = {"kind": "eval", "step": 10, "loss": 3.0} | ({} if bits is None else {"bits_per_byte": bits})
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    if tokenizer:
        write_state(folder, step=10, tokenizer=tokenizer)
    return folder


def test_only_settings_that_differ_are_shown_the_runs_folder_aside(runs: list[Path], tmp_path: Path) -> None:
    write_comparison(runs, out=tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    rows = re.findall(
        r'<th scope="row">([a-z_]+\.[a-z_]+)</th><td class="long">(.*?)</td><td class="long">(.*?)</td>', html
    )
    assert rows == [("optim.lr", "0.002", "0.004")]
    assert html.count("<svg") == 7


def test_the_terminal_gets_a_line_per_run(runs: list[Path], tmp_path: Path) -> None:
    lines = write_comparison(runs, out=tmp_path / "page.html")
    assert [line.split()[0] for line in lines[:3]] == ["run", "base", "fast"]
    assert lines[3].startswith("All runs have the same tokenizer")
    assert lines[4] == f"page: {tmp_path / 'page.html'}"


def test_the_same_runs_give_the_same_bytes(runs: list[Path], tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_comparison(runs, out=tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("tokenizers", "bits", "column", "words"),
    [
        (("aa", "aa"), (1.0, 1.0), "loss", "same tokenizer"),
        (("aa", "bb"), (1.0, 1.0), "bits_per_byte", "different tokenizers"),
        (("aa", ""), (1.0, 1.0), "bits_per_byte", "not on record"),
        (("", ""), (1.0, 1.0), "bits_per_byte", "not on record"),
        (("aa", "bb"), (1.0, None), "loss", "beware"),
    ],
)
def test_nats_are_compared_only_between_runs_of_one_tokenizer(
    tmp_path: Path, tokenizers: tuple[str, str], bits: tuple[float, float | None], column: str, words: str
) -> None:
    paths = [tiny(tmp_path / f"r{n}", bits=bits[n], tokenizer=tokenizers[n]) for n in range(2)]
    unit = unit_of([read_run(path) for path in paths])
    assert unit.column == column
    assert words in unit.sentence


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
    with pytest.raises(ConfigError, match=r"1 run\(s\) to compare.*txl report"):
        write_comparison(runs[:1], out=out)
    with pytest.raises(ConfigError, match=r"are the same run\. Name each run once"):
        write_comparison([runs[0], runs[1], runs[0] / ".." / "base"], out=out)
    with pytest.raises(DataError, match="no such folder"):
        write_comparison([runs[0], tmp_path / "nowhere"], out=out)
    with pytest.raises(ConfigError, match="Name another file with --out"):
        write_comparison(runs, out=tmp_path / "nowhere" / "page.html")
    assert not out.exists()


def test_both_verbs_answer_and_name_their_page(
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
