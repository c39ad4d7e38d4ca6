"""Files that contributors need: workflows, scripts and versions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from txl_dist.version import __version__

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def run(*words: str, **variables: str) -> str:
    """Run a script of launch/ with the environment of these tests, and return what it prints."""
    environment = os.environ | {"VENV": sys.prefix, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_only_calls_scripts_of_launch(path: Path) -> None:
    workflow: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", True, "permissions", "jobs"} == workflow.keys()  # YAML reads the key `on` as true
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert {"actions/checkout@v4", "actions/setup-python@v5"} == {
        step["uses"] for step in job["steps"] if "uses" in step
    }
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        script = re.fullmatch(r"bash (launch/\w+\.sh)( --[\w=-]+)*", command)
        assert script, command
        assert (ROOT / script[1]).is_file()


def test_the_default_tests_run_on_the_oldest_and_the_newest_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.13"]


def test_every_page_says_the_same_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert released_versions()[0] == __version__


def released_versions() -> list[str]:
    """Versions of the changelog, the newest first, each with a date in the form of Keep a Changelog."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased, *released = re.findall(r"^## (.*)$", changelog, flags=re.MULTILINE)
    assert unreleased == "[Unreleased]"
    matches = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})", heading) for heading in released]
    assert all(matches), released
    return [match[1] for match in matches if match]


def test_the_changelog_lists_the_versions_under_the_headings_of_keep_a_changelog() -> None:
    assert released_versions() == ["0.3.0", "0.2.0", "0.1.0"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = set(re.findall(r"^### (.*)$", changelog, flags=re.MULTILINE))
    assert headings <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    items = changelog.partition("\n## ")[2].splitlines()[1:]
    assert [line for line in items if not re.match(r"## \[|### |- [^ ]|$", line)] == []  # an item is one line


@pytest.mark.slow
def test_the_wheel_works_where_only_it_and_its_dependencies_are_installed(tmp_path: Path) -> None:
    packages = Path(pytest.__file__).parents[1]
    printed = run("bash", "launch/wheel.sh", str(tmp_path / "wheel"), DEPENDENCIES=str(packages))
    assert f"the wheel works: txl_dist-{__version__}" in printed
    assert (tmp_path / "wheel/run/report.html").is_file()
    assert "usage: txl" in (tmp_path / "wheel/help.txt").read_text(encoding="utf-8")


def test_the_page_of_stable_formats_lists_the_versions_that_are_read() -> None:
    from txl_dist.artifacts import READABLE_VERSIONS
    from txl_dist.convert import onnx_graphs
    from txl_dist.data import format as corpus_format
    from txl_dist.inference import bundle, text_memory
    from txl_dist.io import manifest
    from txl_dist.tokenizers import base

    page = (ROOT / "docs/api.md").read_text(encoding="utf-8").partition("## File formats")[2]
    rows = dict(re.findall(r"^\| ([\w ]+?)(?: \(`[^|]*)? \| (\d[^|]*) \|$", page, flags=re.MULTILINE))
    versions = {what: tuple(map(int, re.findall(r"(?<![\w])\d(?![\w])", text))) for what, text in rows.items()}
    assert versions == {
        "corpus": (corpus_format.FORMAT_VERSION,),
        "tokenizer": (base.FORMAT_VERSION,),
        "checkpoint": READABLE_VERSIONS,
        "manifest": (manifest.FORMAT_VERSION,),
        "bundle": bundle.FORMAT_VERSIONS,
        "memory of a text": (int(text_memory.FORMAT_VERSION),),
        "ONNX folder": (onnx_graphs.FORMAT_VERSION,),
    }
