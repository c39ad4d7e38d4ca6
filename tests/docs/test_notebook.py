"""The notebook runs from its first cell to its last, and its output agrees with its text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.helpers import forked

NOTEBOOK = ROOT / "examples/first_steps.ipynb"
SOURCE, PART = "Path(txl_dist.__file__).parent ", 'Path(txl_dist.__file__).parent / "train" '
"""The text of the notebook, and a fifth of it, on which the test runs: the whole is scored for a minute."""


def read(path: Path) -> Any:
    nbformat = pytest.importorskip("nbformat", reason="nbformat comes with nbclient, in the extra `dev`")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def test_it_is_stored_without_outputs() -> None:
    cells = [cell for cell in read(NOTEBOOK).cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in cells] == [[]] * len(cells)
    assert {cell.execution_count for cell in cells} == {None}


def test_its_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#\s]+)", NOTEBOOK.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if "://" not in link and not (NOTEBOOK.parent / link).is_file()] == []


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.docs
@pytest.mark.nightly
def test_its_cells_run_and_show_what_they_say(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is in the extra `dev`")
    notebook = read(NOTEBOOK)
    (first,) = (cell for cell in notebook.cells if SOURCE in cell.source)
    first.source = first.source.replace(SOURCE, PART)
    client = nbclient.NotebookClient(
        notebook, timeout=400, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=forked.environment())
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))
    bits = {
        name: float(value) for name, value in re.findall(r"^(model|memory off|bigram).*?\s{3,}(\d\.\d+)", printed, re.M)
    }
    assert bits["model"] < bits["memory off"] < bits["bigram"]
    nats = {name: float(value) for name, value in re.findall(r"^(fresh|remembered) +(\d\.\d+)$", printed, re.M)}
    assert nats["remembered"] < nats["fresh"]
    surprises = [float(value) for value in re.findall(r"^ *(\d+\.\d+) nats: ['\"]", printed, re.M)]
    (mean,) = (float(value) for value in re.findall(r"^ *(\d+\.\d+) nats per token in all$", printed, re.M))
    assert len(surprises) == 5
    assert surprises == sorted(surprises, reverse=True)
    assert surprises[-1] > mean
    assert (tmp_path / "first_steps/turn.safetensors").is_file()
