"""Writes what pages take from the code: docs/settings.md (every setting), docs/commands.md (every command), tables.

    python -m tools.checks.reference_pages            write all
    python -m tools.checks.reference_pages --check    say which page is stale; exit code 1 then

A setting's type, bounds, default and meaning come from the schema of its section, what a change means for a run that
continues from its `Resume` class, a command's page from its own --help. `page_tables` makes the tables that stand in
other pages. tests/docs/test_pages.py holds all of them to the code.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tools.checks.page_tables import TABLES, with_table
from txl_dist.cli.main import COMMANDS, main
from txl_dist.config.load import Config, resume_policy

DOCS = Path(__file__).parents[2] / "docs"
MADE_BY = "<!-- Made by `python -m tools.checks.reference_pages`; edit the code, not this page. -->"
ON_RESUME = {
    "frozen": "frozen: a change is refused",
    "warned": "may change, with a line in the log",
    "free": "may change",
}
SETTINGS_HEAD = f"""# Configuration reference

{MADE_BY}

A run's settings stand in a TOML file, in the sections below; the file holds those that differ from the defaults, and
`--section.key value` behind it overrides it: `txl train CONFIG.toml --optim.lr 1e-3`. Lists are written
`--model.cutoffs 1000 5000` (nothing behind it: empty). A switch is true where no value follows:
`--checkpoint.keep_best`, else `--checkpoint.keep_best False`. Hyphens may stand for underscores. An unknown name is
refused with the nearest known one, also where it comes from another code base. `txl train CONFIG.toml --dry-run`
prints the settings of a run that differ from the defaults, with `--all` all of them. `RUN/config.toml` has all.

Sizes are global: they do not depend on the number of ranks. *On resume* says what happens when the same run is started
again with another value ([resuming with other settings](checkpoints.md#resuming-with-other-settings)).
"""
COMMANDS_HEAD = f"""# Command reference

{MADE_BY}

What `txl COMMAND --help` prints. `python -m txl_dist COMMAND` is the same. Exit codes: 0 done, 2 a mistake that the
message explains, 75 and 76 of a training that wants to be started again ([checkpoints.md](checkpoints.md#stopping)).

## Shell completion

`txl completion SHELL` writes a script that completes commands, flags, settings, choices and file names when TAB is
pressed. It starts no program. Write it again after an update.

<!-- not run: installs -->
```bash
txl completion bash > ~/.local/share/bash-completion/completions/txl
txl completion zsh > ~/.zfunc/_txl        # with fpath+=(~/.zfunc) before compinit in ~/.zshrc
txl completion fish > ~/.config/fish/completions/txl.fish
```
"""


def settings_page() -> str:
    """Markdown of docs/settings.md: a heading per setting, so that each can be linked and searched."""
    parts = [SETTINGS_HEAD]
    for section, info in Config.model_fields.items():
        schema = type(info.default).model_json_schema()
        parts.append(f"## {section}\n\n{schema['description']}\n")
        for key, field in schema["properties"].items():
            facts = [
                _type(field),
                f"default {_default(field['default'])}",
                f"on resume: {ON_RESUME[resume_policy(f'{section}.{key}')]}",
            ]
            parts.append(f"### {section}.{key}\n\n{_escaped(field['description'])}\n\n*{'; '.join(facts)}*\n")
    return "\n".join(parts)


def commands_page() -> str:
    """Markdown of docs/commands.md: each command's help, without the settings, which have a page of their own."""
    parts = [COMMANDS_HEAD]
    for command in COMMANDS:
        lines = list(_without_rules(help_text(command)))
        if command == "train":
            first = next(index for index, line in enumerate(lines) if line == "run options")
            lines = [*lines[:first], "--section.key VALUE: every setting; see the configuration reference"]
        parts.append(f"## {command}\n\n```text\n{chr(10).join(lines).strip()}\n```\n")
    return "\n".join(parts)


def help_text(command: str) -> str:
    """What `txl COMMAND --help` prints into a pipe: 100 columns of ASCII, without colour."""
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        main([command, "--help"])
    return printed.getvalue()


def _without_rules(text: str) -> Iterator[str]:
    """tyro's help without trailing blanks, the lines under headings, and the indentation that all share."""
    for line in text.splitlines():
        if not re.fullmatch(r" ?-+\s*", line):
            yield line.rstrip().removeprefix(" ")


def _type(field: dict[str, Any]) -> str:
    """The type of a setting with its choices or bounds, in words."""
    if "enum" in field:
        return "one of " + ", ".join(f"`{choice}`" for choice in field["enum"])
    if "prefixItems" in field:
        return f"list of {len(field['prefixItems'])}, each: {_type(field['prefixItems'][0])}"
    if field["type"] == "array":
        return f"list, each: {_type(field['items'])}"
    name = {"integer": "integer", "number": "number", "string": "text", "boolean": "`true` or `false`"}[field["type"]]
    marks = {"exclusiveMinimum": "above", "minimum": "at least", "exclusiveMaximum": "below", "maximum": "at most"}
    bounds = [f"{words} {_number(field[mark])}" for mark, words in marks.items() if mark in field]
    return f"{name} {' and '.join(bounds)}".rstrip()


def _default(value: Any) -> str:
    if value in ("", []):
        return "empty"
    return f"`{json.dumps(value)}`"


def _number(value: float) -> str:
    return f"{value:g}"


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("*", "\\*").replace("<", "&lt;")


PAGES = {"settings.md": settings_page, "commands.md": commands_page}
"""Pages that are made from the code as a whole."""


def page_now(name: str) -> str:
    """Return what a page of docs/ should hold by the code as it is now. Raises ValueError for a page without marks."""
    if name in PAGES:
        return PAGES[name]()
    title, make_table = TABLES[name]
    return with_table((DOCS / name).read_text(encoding="utf-8"), title, make_table())


def stale_pages() -> list[str]:
    """Names of the pages in docs/ that are not what the code gives now."""
    stale = []
    for name in (*PAGES, *TABLES):
        path = DOCS / name
        if not path.is_file() or path.read_text(encoding="utf-8") != page_now(name):
            stale.append(name)
    return stale


def run() -> int:
    """Write the pages, or with --check name those that are stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is stale")
    stale = stale_pages()
    if parser.parse_args().check:
        print(
            "\n".join(f"docs/{name} is stale: run python -m tools.checks.reference_pages" for name in stale)
            or "up to date"
        )
        return 1 if stale else 0
    for name in stale:
        (DOCS / name).write_text(page_now(name), encoding="utf-8")
        print(f"docs/{name}: written")
    return 0


if __name__ == "__main__":
    sys.exit(run())
