"""`txl report` of paths without records: a checkpoint shows its run, and a bundle shows its contents."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.made_runs import HOSTILE, make_run
from txl_dist.cli.main import main
from txl_dist.io.manifest import describe_file, files_of, problems_of, write_manifest

GOLDEN = Path(__file__).parents[2] / "golden/checkpoint_v2/step_000000016"


def make_bundle(folder: Path, *, run: str = "first") -> Path:
    """The files of a bundle, as far as names and settings go."""
    folder.mkdir()
    model = {"num_layers": 7, "width": 12}
    content = {"vocab_size": 257, "dtype": "bf16", "segment_len": 8, "memory_len": 12, "document_mask": True}
    source = {"run": run, "step": 16}
    (folder / "config.json").write_text(json.dumps(content | {"model": model, "source": source}))
    (folder / "model.safetensors").touch()
    write_manifest(folder, {name: describe_file(folder / name) for name in files_of(folder)})
    return folder


@pytest.mark.slow
def test_a_checkpoint_in_a_run_shows_the_page_of_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert main(["report", str(checkpoint), "--out", str(tmp_path / "a.html")]) == 0
    assert f"is a checkpoint of the run {run}:" in capsys.readouterr().out
    assert main(["report", str(run), "--out", str(tmp_path / "b.html")]) == 0
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_a_checkpoint_away_from_its_run_shows_what_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tmp_path / GOLDEN.name
    shutil.copytree(GOLDEN, checkpoint)
    before = problems_of(checkpoint)
    assert main(["report", str(checkpoint)]) == 0
    shown = capsys.readouterr().out
    assert "has no records of its training" in shown
    assert f"page: {checkpoint}.html" in shown
    page = Path(f"{checkpoint}.html").read_text()
    state = json.loads((checkpoint / "state.json").read_text())
    assert f"{state['tokens_seen']:,}" in page
    assert "train.segment_len" in page
    assert problems_of(checkpoint) == before, "nothing is written into it"


def test_a_bundle_shows_what_it_holds_and_no_text_of_it_becomes_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = make_bundle(tmp_path / "bundle", run=HOSTILE)
    assert main(["report", str(bundle)]) == 0
    page = (tmp_path / "bundle.html").read_text()
    for text in ("step 16 of", "model.num_layers", "bf16", "data.document_mask"):
        assert text in page
    assert "<script" not in page
    assert problems_of(bundle) == []
    assert main(["report", str(bundle), "--out", str(bundle / "page.html")]) == 2
    assert "report damage" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"source": 3}', "[" * 10**5])
def test_a_damaged_bundle_is_one_line(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    (bundle / "config.json").write_text(content)
    assert main(["report", str(bundle)]) == 2
    beginning, *errors = capsys.readouterr().err.splitlines()
    assert beginning == f"txl report: reading {bundle}"
    assert len(errors) == 1
    assert f"`txl verify {bundle}`" in errors[0]
