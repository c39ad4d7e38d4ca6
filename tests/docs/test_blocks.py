"""Every block of the documentation that is marked as runnable is run, as a reader would paste it.

The blocks of a page run in order in one folder with the contents of a checkout. The quick start runs first. Every other
page runs in a copy of the folder after the quick start, with data/first, runs/first and bundles/first. In these pages
`txl` is forked from a process that has imported everything (see `warm_txl`). The quick start uses the real `txl`. The
folder contains only one part of the package's source, which the pages use as a text, because all of it would take four
times as long.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, Block, blocks_of, pattern_of
from tests.docs.warm_txl import serve
from tests.helpers import forked

pytestmark = [pytest.mark.docs, pytest.mark.dist, pytest.mark.slow]

FIRST = ROOT / "docs" / "getting-started.md"
OTHERS = [page for page in PAGES if page != FIRST and any(block.mark == "run" for block in blocks_of(page))]
OF_A_CHECKOUT = ("README.md", "configs", "docs", "examples", "launch", "tests", "tools")
SOURCE = "txl_dist/model"
"""The part of the package's source that is there to be read."""


def run(block: Block, folder: Path, *, variables: dict[str, str]) -> str:
    """What a block prints, standard error included; it must end with exit code 0."""
    command = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
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


def walk(page: Path, folder: Path, *, bin_folder: Path | None = None) -> None:
    """Do what a page says: save its files, run its blocks, compare what they print. A `txl` may lie in `bin_folder`."""
    printed, variables = "", forked.environment(PYTHONSAFEPATH=1)  # the package is not the part of it in `folder`
    if bin_folder is not None:
        variables["PATH"] = f"{bin_folder}:{variables['PATH']}"
    for block in blocks_of(page):
        if block.mark == "file":
            (folder / block.detail).write_text(block.text, encoding="utf-8")
        elif block.mark == "run":
            printed = run(block, folder, variables=variables)
        elif block.is_output and not pattern_of(block.text).search(printed):
            raise AssertionError(f"{block.place} promises other output than:\n{printed[-6000:]}")


@pytest.fixture(scope="session")
def after_the_quick_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of someone who has done the quick start."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in OF_A_CHECKOUT:
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / SOURCE, folder / SOURCE, ignore=shutil.ignore_patterns("__pycache__"))
    write_readers_texts(folder)
    walk(FIRST, folder)
    return folder


def write_readers_texts(folder: Path) -> None:
    """Write what pages call the reader's own texts, `novels/` and `articles.jsonl`: the same source."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / SOURCE).rglob("*.py"))]
    (folder / "novels").mkdir()
    for number, text in enumerate(texts[::2]):
        (folder / "novels" / f"{number}.txt").write_text(text, encoding="utf-8")
    lines = (json.dumps({"text": text}) + "\n" for text in texts[1::2])
    (folder / "articles.jsonl").write_text("".join(lines), encoding="utf-8")


def test_the_quick_start_does_what_it_says(after_the_quick_start: Path) -> None:
    assert (after_the_quick_start / "runs/first/DONE").is_file()
    assert (after_the_quick_start / "bundles/first/model.safetensors").is_file()


@pytest.fixture(scope="module")
def warm_bin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a `txl` that starts at once."""
    folder = tmp_path_factory.mktemp("bin")
    with serve(folder) as server:
        yield folder
        server.shutdown()


@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.stem)
def test_every_marked_block_of_a_page_runs(
    page: Path, after_the_quick_start: Path, warm_bin: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkout"
    shutil.copytree(after_the_quick_start, folder, symlinks=True)
    walk(page, folder, bin_folder=warm_bin)


def test_a_block_that_fails_or_prints_something_else_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- run -->\n```bash\necho step 3, loss 2.5\n```\n\n```text\nstep ..., loss 9\n```\n")
    with pytest.raises(AssertionError, match="promises other output"):
        walk(page, tmp_path)
    page.write_text("<!-- run -->\n```bash\nfalse\necho never\n```\n")
    with pytest.raises(AssertionError, match="ended with 1"):
        walk(page, tmp_path)
