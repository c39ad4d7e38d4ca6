"""The contents of a line of metrics, on terminals of any width and in files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.logs import format_record
from tests.helpers.terminal import Terminal
from tests.unit.train.report.test_loggers import LOOK
from tests.unit.train.report.test_metrics import EVAL_RECORD, TRAIN_RECORD
from txl_dist.train.report.loggers import record_cells
from txl_dist.train.report.metric_table import METRICS, Cell, cells_of, line_of

ROOT = Path(__file__).parents[4]
FULL = TRAIN_RECORD | {"mfu_pct": 41.2, "save_s": 0.25, "skipped_steps": 3, "skipped_documents": 2}
SCRIPT = """
import json, sys
from pathlib import Path
from tests.unit.train.report.test_metrics import reporter
from txl_dist.console.logging import logger, start_logging
folder = Path(sys.argv[1])
start_logging(file=folder / "log.txt")
report = reporter(folder)
for kind, record in json.loads(sys.argv[2]):
    report.write(kind, record)
logger.warning("something is odd")
report.close()
"""


def show(folder: Path, warm_bin: Path, *, columns: int | None, **environment: str) -> tuple[list[str], str]:
    """(the lines of the log as a terminal of so many columns, or a pipe, got them, log.txt)."""
    words = [str(folder), json.dumps([["train", FULL], ["eval", EVAL_RECORD], ["memory", LOOK]])]
    own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")} | {"TERM": "xterm"}
    command = [str(warm_bin / "python"), "-c", SCRIPT, *words]
    if columns is None:
        shown = subprocess.run(command, env=own | environment, cwd=ROOT, capture_output=True, text=True, check=True)
        text = shown.stderr
    else:
        with Terminal(columns=columns) as terminal:
            subprocess.run(command, env=own | environment, cwd=ROOT, stderr=terminal.device, check=True)
            text = terminal.read()
    lines = [line for line in re.split(r"[\r\n]+", text) if re.search(r"\d\d:\d\d:\d\d [IW] ", line)]
    return lines, (folder / "log.txt").read_text()


def plain(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.slow)])
def test_a_line_of_numbers_fits_the_terminal_and_log_txt_has_the_whole_line(
    tmp_path: Path, warm_bin: Path, columns: int
) -> None:
    lines, log = show(tmp_path, warm_bin, columns=columns)
    assert len(lines) == 4
    assert max(len(plain(line)) for line in lines) <= columns
    assert all(word in lines[0] for word in ("loss 2.0000", "skipped 3", "damaged documents 2"))
    assert format_record("train", FULL, max_steps=1000) in log
    assert format_record("memory", LOOK, max_steps=1000) in log


@pytest.mark.parametrize("columns", [300, pytest.param(None, marks=pytest.mark.slow)])
def test_a_wide_terminal_and_a_pipe_get_everything(tmp_path: Path, warm_bin: Path, columns: int | None) -> None:
    lines, log = show(tmp_path, warm_bin, columns=columns, **({} if columns else {"COLUMNS": "40"}))
    assert plain(lines[0])[11:] == format_record("train", FULL, max_steps=1000)
    assert [plain(line).strip() for line in lines] == log.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "no_color", "is_coloured"), [(80, "", True), (80, "1", False), (None, "", False)])
def test_warnings_have_a_colour_on_a_terminal_only(
    tmp_path: Path, warm_bin: Path, columns: int | None, no_color: str, is_coloured: bool
) -> None:
    lines, log = show(tmp_path, warm_bin, columns=columns, NO_COLOR=no_color)
    assert ("\x1b[33m" in lines[-1]) is is_coloured
    assert "\x1b[3" not in "".join(lines[:-1])
    assert "\x1b" not in log
    assert log.endswith("W something is odd\n")


def test_a_line_loses_the_least_important_numbers_first_and_keeps_the_loss() -> None:
    cells = cells_of(FULL)
    dropped = sorted((cell for cell in cells if cell.drop), key=lambda cell: -cell.drop)
    kept = list(cells)
    for cell in dropped:
        kept.remove(cell)
        assert line_of(cells, width=len(line_of([*kept, cell])) - 1) == line_of(kept)
    assert line_of(cells, width=1) == "loss 2.0000  skipped 3  damaged documents 2"
    assert line_of([Cell("a"), Cell("b", drop=1)], width=4) == "a  b"
    assert record_cells("eval", EVAL_RECORD, max_steps=9)[:2] == [Cell("step 40/9"), Cell("eval")]


def test_a_number_that_a_record_lacks_is_left_out() -> None:
    assert line_of(cells_of({"loss": 1.0, "bits_per_byte": None, "skipped_steps": 0})) == "loss 1.0000"


def test_the_page_on_training_explains_every_number_of_the_table() -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    rows = "\n".join(line.partition(" | ")[0] for line in page.splitlines() if line.startswith("| `"))
    unnamed = [
        metric.name for metric in METRICS.values() if metric.form and f"`{metric.label or metric.unit}`" not in rows
    ]
    assert unnamed == []


def test_no_torch_is_needed_to_know_the_numbers() -> None:
    script = "import sys, txl_dist.train.report.metric_table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0
