"""Every block of the documentation that is marked as runnable is run, as a reader would paste it.

The blocks of a page run in order in one folder with the contents of a checkout. The quick start runs first. Every other
page runs in a copy of the folder after the quick start, with data/first, runs/first and bundles/first. In these pages
`txl` and `python` are forked from a process that has imported everything (see `tests.helpers.warm_programs`). The
folder contains only one part of the package's source, which the pages use as a text, because all of it would take four
times as long.

Every run makes the trainings of the pages shorter, see SHORTER. The nightly run does what the pages say to the letter,
and its quick start uses the real `txl`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.pages import PAGES, ROOT, Block, blocks_of, pattern_of
from tests.helpers import forked

pytestmark = [pytest.mark.docs, pytest.mark.dist, pytest.mark.slow]

FIRST = ROOT / "docs" / "getting-started.md"
OTHERS = [page for page in PAGES if page != FIRST and any(block.mark == "run" for block in blocks_of(page))]
OF_A_CHECKOUT = ("README.md", "configs", "docs", "examples", "launch", "tests", "tools")
SOURCE = "txl_dist/model"
"""The part of the package's source that is there to be read."""


SHORTER = {
    "warmup_steps = 20": "warmup_steps = 4",
    "max_steps = 200": "max_steps = 40",
    "every_steps = 100": "every_steps = 20",
    "step_000000200": "step_000000040",
    "step_000000100": "step_000000020",
    "step 200/200": "step 40/40",
    "checkpoint: step 200": "checkpoint: step 40",
    "200 steps, 102,400 tokens, in runs/first": "40 steps, 20,480 tokens, in runs/first",
    "max_steps 220": "max_steps 44",
    "from 200 to 220": "from 40 to 44",
    "220 steps, 112,640 tokens": "44 steps, 22,528 tokens",
    "max_steps 125": "max_steps 25",
    "125 steps, 64,000 tokens": "25 steps, 12,800 tokens",
    "step_000000125": "step_000000025",
    "runs/stopped --": "runs/stopped --train.max_steps 200 --",  # longer than its time limit of one second
    "steps 1 to 100": "steps 1 to 20",
    "steps 101 to 200": "steps 21 to 40",
    "max_steps 120": "max_steps 24",
    "sample_every_steps 40": "sample_every_steps 8",
    "step  40/120": "step  8/24",
    "train configs/mine.toml": "train configs/mine.toml --train.max_steps 40",
    "step 600/600": "step 40/40",
    "runs/xlnet --train.max_steps 10": "runs/xlnet --train.max_steps 2 --train.num_lanes 8 --train.microbatch_lanes 8",
}
"""Texts of blocks that every run replaces: a fifth of the steps, or fewer."""


def shorter(text: str) -> str:
    """Return the text of a block with the replacements of SHORTER."""
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    return text


def run(block: Block, folder: Path, *, variables: dict[str, str]) -> str:
    """What a block prints, standard error included; it must end with exit code 0."""
    command = ["python", "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    command[0] = shutil.which(command[0], path=variables["PATH"]) or command[0]
    process = subprocess.run(
        [*command, block.text],
        stdin=subprocess.DEVNULL,
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    if process.returncode:
        raise AssertionError(f"{block.place} ended with {process.returncode}:\n{process.stdout[-4000:]}")
    return process.stdout


def walk(page: Path, folder: Path, *, bin_folder: Path | None = None, is_shorter: bool = False) -> None:
    """Do what a page says: save its files, run its blocks, compare what they print. A `txl` and a `python` may lie in
    `bin_folder`. With `is_shorter`, the blocks have the replacements of SHORTER."""
    printed, variables = "", forked.environment(PYTHONSAFEPATH=1)  # the package is not the part of it in `folder`
    if bin_folder is not None:
        variables["PATH"] = f"{bin_folder}:{variables['PATH']}"
    for literal in blocks_of(page):
        block = literal._replace(text=shorter(literal.text)) if is_shorter else literal
        if block.mark == "file":
            (folder / block.detail).write_text(block.text, encoding="utf-8")
        elif block.mark == "run":
            printed = run(block, folder, variables=variables)
        elif block.is_output and not pattern_of(block.text).search(printed):
            raise AssertionError(f"{block.place} promises other output than:\n{printed[-6000:]}")


class Done(NamedTuple):
    """The folder of someone who has done the quick start, and whether it was a shorter one."""

    folder: Path
    is_shorter: bool


@pytest.fixture(scope="session", params=["shorter", pytest.param("literal", marks=pytest.mark.nightly)])
def quick_start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, warm_bin: Path) -> Done:
    """The quick start, done once. The literal one uses the real `txl`."""
    folder, is_shorter = tmp_path_factory.mktemp("checkout"), request.param == "shorter"
    for name in OF_A_CHECKOUT:
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / SOURCE, folder / SOURCE, ignore=shutil.ignore_patterns("__pycache__"))
    write_readers_texts(folder)
    walk(FIRST, folder, bin_folder=warm_bin if is_shorter else None, is_shorter=is_shorter)
    return Done(folder, is_shorter)


def write_readers_texts(folder: Path) -> None:
    """Write what pages call the reader's own texts, `novels/` and `articles.jsonl`: the same source."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / SOURCE).rglob("*.py"))]
    (folder / "novels").mkdir()
    for number, text in enumerate(texts[::2]):
        (folder / "novels" / f"{number}.txt").write_text(text, encoding="utf-8")
    lines = (json.dumps({"text": text}) + "\n" for text in texts[1::2])
    (folder / "articles.jsonl").write_text("".join(lines), encoding="utf-8")


def test_the_quick_start_does_what_it_says(quick_start: Done) -> None:
    assert (quick_start.folder / "runs/first/DONE").is_file()
    assert (quick_start.folder / "bundles/first/model.safetensors").is_file()


@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.stem)
def test_every_marked_block_of_a_page_runs(page: Path, quick_start: Done, warm_bin: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    shutil.copytree(quick_start.folder, folder, symlinks=True)
    walk(page, folder, bin_folder=warm_bin, is_shorter=quick_start.is_shorter)


def test_each_text_that_every_run_replaces_is_in_a_block_of_a_page() -> None:
    texts = [block.text for page in PAGES for block in blocks_of(page)]
    assert [long for long in SHORTER if not any(long in text for text in texts)] == []


def test_a_block_that_fails_or_prints_something_else_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- run -->\n```bash\necho step 3, loss 2.5\n```\n\n```text\nstep ..., loss 9\n```\n")
    with pytest.raises(AssertionError, match="promises other output"):
        walk(page, tmp_path)
    page.write_text("<!-- run -->\n```bash\nfalse\necho never\n```\n")
    with pytest.raises(AssertionError, match="ended with 1"):
        walk(page, tmp_path)
