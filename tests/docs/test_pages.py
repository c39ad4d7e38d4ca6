"""The documentation builds without a warning, names only things that exist, and quotes only real output."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import (
    NOTEBOOK,
    PAGES,
    ROOT,
    SHELLS,
    anchors_of,
    blocks_of,
    code_of,
    headings_of,
    links_of,
    mkdocs_anchor,
    pattern_of,
    prose_of,
)
from tools.checks.prose import count_pages
from tools.checks.reference_pages import help_text, stale_pages
from txl_dist.cli.main import COMMANDS
from txl_dist.config.load import setting_names

PACKAGE = ROOT / "txl_dist"
WHY_NOT = {
    "installs": "would install packages",
    "minutes": "takes minutes",
    "cluster": "needs several machines, a scheduler or a container runtime",
    "gpu": "needs a GPU",
    "your files": "names files that only its reader has",
    "root": "needs root",
    "server": "needs a server that listens",
}
"""Reasons for which a shell block need not be run."""
OTHERS = {"pip", "torch", "torchrun", "DeepSpeed", "NCCL", "gloo", "kernel", "ssh", "SLURM", "no message"}
"""Whose messages troubleshooting.md explains besides ours."""
FOLDERS = ("configs", "docker", "docs", "examples", "launch", "tests", "tools", "txl_dist")
FLAGS_OF_OTHERS = {
    *("--num_accelerators", "--num_gpus", "--num_nodes", "--hostfile", "--include", "--exclude", "--launcher"),
    *("--master_port", "--master_addr", "--no_ssh", "--node_rank", "--ssh_port", "--module", "--no_ssh_check"),
}
"""Of the `deepspeed` launcher, which `txl launch` passes on."""

MOST_PAGES, MOST_WORDS = 26, 38_000
"""Bounds of docs/, in words as `wc -w` counts them. They may be lowered and never raised."""
MOST_WORDS_OF = {"recovery.md": 900}
"""Bounds of single pages."""
MOST_LONG_PCT = 0.3
"""Sentences over 25 words in docs/ and README, in percent."""
MOST_SEMICOLONS = 0.1
"""Semicolons in 1,000 words of prose of docs/ and README."""

ATTRIBUTES = {"model.config", "model.empty_memory", "optim.apply_settings"}
"""What looks like a setting and is code."""
PLACEHOLDERS = {"--section.key"}

WITH_LINKS = [*PAGES, *NOTEBOOK, ROOT / "CHANGELOG.md", ROOT / "tests/golden/README.md"]
CODE_FOLDERS = ("configs", "docker", "examples", "launch", "tools", "txl_dist")
CODE_SUFFIXES = {".py", ".toml", ".sh", ".sbatch", ".yaml", ".j2", ".html", ".js", ".ipynb", ".env"}

each_page = pytest.mark.parametrize("page", [*PAGES, *NOTEBOOK], ids=lambda page: str(page.relative_to(ROOT)))


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is in the extra `docs`")
    command = ["bash", "launch/docs.sh", str(tmp_path / "site")]
    environment = os.environ | {"VENV": sys.prefix, "PYTHON": sys.executable}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        fetched = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=.?(?:https?:)?//[^>]*>", page.read_text())
        assert fetched == [], f"{page.name} would fetch from the network"


def test_the_reference_pages_are_what_the_code_gives() -> None:
    assert stale_pages() == [], "run `python -m tools.checks.reference_pages`"


def test_the_documentation_stays_short_and_plain() -> None:
    """`python -m tools.checks.prose` prints these numbers."""
    docs = count_pages([page for page in PAGES if page.parent.name == "docs"])
    assert docs.pages <= MOST_PAGES
    assert docs.words <= MOST_WORDS
    for name, most_words in MOST_WORDS_OF.items():
        assert count_pages([ROOT / "docs" / name]).words <= most_words, name
    with_readme = count_pages(PAGES)
    assert with_readme.long_pct <= MOST_LONG_PCT
    assert with_readme.semicolons_per_1000 <= MOST_SEMICOLONS


@pytest.mark.parametrize("page", WITH_LINKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_and_their_anchors_resolve(page: Path) -> None:
    assert broken_links(page, prose_of(page)) == []


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links of a page with this text that lead to no file, or to no heading."""
    broken = []
    for target in links_of(text):
        if re.match(r"[a-z]+:", target):  # of another site
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        if not other.exists() or (anchor and anchor not in anchors_of(other)):
            broken.append(target)
    return broken


@each_page
def test_no_two_headings_of_a_page_have_the_same_anchor(page: Path) -> None:
    anchors = [mkdocs_anchor(title) for title in headings_of(page)]
    assert {anchor for anchor in anchors if anchors.count(anchor) > 1} == set(), f"{page.name}: a link finds the first"


def test_pages_that_code_and_messages_name_exist_with_their_headings() -> None:
    """A page is `docs/NAME.md` or `notebook/NAME.md`, or in a template of a page a link to a neighbour."""
    pattern = re.compile(r"\b(?:docs|notebook)/[\w-]+\.md(?:#[\w-]+)?|\b[\w-]+\.md#[\w-]+")
    num_checked = 0
    for path in sorted(path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*")):
        if path.suffix not in CODE_SUFFIXES:
            continue
        for target in pattern.findall(path.read_text(encoding="utf-8")):
            link = target if target.startswith("docs/") else f"docs/{target}"
            if target.startswith("notebook/"):
                link = f"tools/experiments/{target}"
            assert broken_links(ROOT / "README.md", f"[page]({link})") == [], f"{path.relative_to(ROOT)}: {target}"
            num_checked += 1
    assert num_checked > 30


@each_page
def test_every_setting_that_is_named_exists(page: Path) -> None:
    names = set(setting_names())
    sections = "|".join({name.split(".")[0] for name in names})
    file_endings = r"(?!(?:py|md|toml|jsonl?|txt|pt|pth|bin|safetensors|pkl|tar|yaml|sh|html|png)\b)"
    pattern = re.compile(rf"(?<![\w./-])(?:--)?((?:{sections})\.{file_endings}[a-z_]+)(?![\w(.])")
    wrong = {name for code in code_of(page) for name in pattern.findall(code)} - names - ATTRIBUTES
    assert wrong == set(), f"{page.name} names settings that do not exist: {wrong}"


@each_page
def test_every_flag_of_a_command_that_is_named_exists(page: Path) -> None:
    wrong = [
        f"txl {command} {flag}"
        for command, words in commands_of(page)
        for flag in (word.split("=")[0] for word in words if re.match(r"--[a-zA-Z]", word))
        if flag.replace("_", "-") not in flags_of(command) | PLACEHOLDERS
    ]
    assert wrong == [], f"{page.name} names flags that do not exist"


@each_page
def test_no_page_promises_a_time_without_a_figure_and_its_command(page: Path) -> None:
    """What is measured stands in tables with the command beside them; this finds the promises of the other kind."""
    vague = r"within (?:a|some|few|\d+) (?:second|minute)|second or two|in (?:a few )?(?:minutes|milliseconds)|in under"
    vague += r"|instantly|immediately|in an instant|under (?:\d+|a|one|two|three) (?:s|minutes?|seconds?)\b"
    found = re.findall(rf"(?i)[^.\n]*\b(?:{vague})[^.\n]*", prose_of(page))
    assert found == [], f"{page.name} promises times: say what was measured, and by which command"


@each_page
def test_every_command_that_is_named_exists(page: Path) -> None:
    named = {command for code in code_of(page) for command in re.findall(r"(?:^|\s)txl ([a-z]+)", code)}
    assert named <= COMMANDS.keys(), page.name


@each_page
def test_every_file_that_is_named_exists(page: Path) -> None:
    words = {word for code in code_of(page) for word in re.findall(r"[\w./*-]+", code)}
    paths = {word for word in words if word.startswith(tuple(f"{folder}/" for folder in FOLDERS))}
    modules = {word for word in words if re.fullmatch(r"(?:[a-z_]+/)+[a-z_]+\.py", word)} - paths
    missing = {path for path in paths if not any(ROOT.glob(path.rstrip("./")))}
    missing |= {module for module in modules if not (PACKAGE / module).is_file() and not (ROOT / module).is_file()}
    assert missing == set(), f"{page.name} names files that do not exist"


def test_the_drawing_of_the_house_has_every_room() -> None:
    page = ROOT / "docs" / "architecture.md"
    drawing = set(re.findall(r"\w+", next(block.text for block in blocks_of(page) if block.language == "text")))
    folders = {path.parent.name for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE}
    assert folders - drawing == set()


@each_page
def test_every_shell_block_is_run_or_says_why_not(page: Path) -> None:
    for block in blocks_of(page):
        if block.language in SHELLS:
            assert block.mark in ("run", "not run"), f"{block.place}: a shell block needs a mark (tests/docs/pages.py)"
        if not block.language:
            commands = re.findall(
                r"^(?:\$ )?(?:txl|bash|deepspeed|torchrun|python|pip|pytest|git|sbatch) .*", block.text, re.MULTILINE
            )
            assert commands == [], f"{block.place}: these are commands; write ```bash"
        assert block.mark != "not run" or block.detail in WHY_NOT, f"{block.place}: {block.detail!r} is no known reason"
        if block.mark == "run":
            assert block.language in (*SHELLS, "python"), block.place


def test_enough_of_the_documentation_is_run() -> None:
    marked = [block for page in PAGES for block in blocks_of(page) if block.mark == "run"]
    assert len(marked) >= 12
    assert {"getting-started.md", "preparing-data.md", "training.md", "inference.md"} <= {
        block.page for block in marked
    }


def quoted_messages() -> list[str]:
    """Our messages among the headings of troubleshooting.md: those without a name in front."""
    titles = re.findall(r"^### (.+)$", (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(titles) >= 40
    assert {title.split(":")[0] for title in titles if not title.startswith("`")} <= OTHERS
    return [title.strip("`") for title in titles if title.startswith("`")]


@pytest.mark.parametrize("message", quoted_messages())
def test_a_quoted_message_is_one_that_the_program_has(message: str) -> None:
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("...")), re.DOTALL)
    assert any(pattern.search(text) for text in texts_of_the_package()), f"nothing says {message!r}"


@cache
def texts_of_the_package() -> list[str]:
    """Every text in the source, with a blank mark where a value goes."""
    texts: list[str] = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\u2026" for part in node.values]
                texts.append("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def commands_of(page: Path) -> Iterator[tuple[str, list[str]]]:
    """(command, words) of every `txl COMMAND ...` in the code of a page."""
    for code in code_of(page):
        for line in code.replace("\\\n", " ").splitlines():
            match = re.match(r"(?:\$ )?(?:.*\| *)?txl ([a-z]+)(.*)", line.split(" #")[0].strip())
            if match and match[1] in COMMANDS:
                yield match[1], words_of(match[2])


def words_of(line: str) -> list[str]:
    """As a shell splits them, up to where another command begins."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # prose with an apostrophe
        words = line.split()
    ends = [index for index, word in enumerate(words) if word in ("|", "||", "&&", ";")]
    return words[: ends[0]] if ends else words


@cache
def flags_of(command: str) -> set[str]:
    """With hyphens. Settings are flags of `launch`, `plan` and `sweep` as well, which pass them on."""
    helps = [help_text(command), help_text("train") if command in ("launch", "plan", "sweep") else ""]
    found = set(re.findall(r"(?<![\w-])--[\w.-]+", "".join(helps)))
    return {flag.replace("_", "-") for flag in found | (FLAGS_OF_OTHERS if command == "launch" else set())}


def test_the_rules_see_what_is_wrong(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two` three\n\n<!-- not run: gpu -->\n```bash\ntxl train x.toml --no_such 1 | cat --ok\n```\n"
    )
    assert anchors_of(page) == {"one-two-three"}
    (tmp_path / "b.md").write_text("## Code 1 or -9\n\n## An [inner](page.md) link\n\n## A - b\n")
    links = "[a](page.md#one-two-three) [b](page.md#one) [c](#code) [d](none.md) [e\nf](b.md) <a href='no.md'>g</a>\n"
    links += "[h](b.md#an-inner-link) [i](b.md#code-1-or-9) [j](b.md#a-b) [k](https://x.org/a#b)\n\n[l]: no.md#x\n"
    assert broken_links(page, links) == [
        *("page.md#one", "#code", "none.md", "b.md#code-1-or-9", "b.md#a-b", "no.md#x", "no.md")
    ]
    assert [(block.mark, block.detail) for block in blocks_of(page)] == [("not run", "gpu")]
    assert list(commands_of(page)) == [("train", ["x.toml", "--no_such", "1"])]
    assert "--no-such" not in flags_of("train")
    assert "--optim.lr" in flags_of("train")
    assert pattern_of("a ... c\n...\nd\n").search("x\na b c\ny\nz\nd\n")
    assert not pattern_of("a ... c\nd\n").search("a b c\ny\nd\n")
    assert pattern_of("loss  tokens\n").search("loss   tokens\n"), "columns are as wide as their values"
    assert not pattern_of("loss  tokens\n").search("loss tokens\n")
