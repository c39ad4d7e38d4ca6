"""Write the pages and tables that are made from the code: docs/settings.md, docs/commands.md, and tables in other
pages.

    python -m tools.checks.reference_pages            write all
    python -m tools.checks.reference_pages --check    report the stale pages, with exit code 1 if there are any

docs/settings.md describes every setting. Type, bounds, default and meaning come from the schema of the setting's
section. The note about resuming comes from the setting's `Resume` class. docs/commands.md describes every command with
its own --help. `page_tables` makes the tables in other pages. tests/docs/test_pages.py checks that all of them are up
to date.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tools.checks.page_tables import TABLES, with_table
from txl_dist.cli.main import COMMANDS, main
from txl_dist.config.load import Config, resume_policy

DOCS = Path(__file__).parents[2] / "docs"
MADE_BY = "<!-- Made by tools/checks/reference_pages.py: edit the code. -->"
HIGHEST_SHOWN = 999
"""Largest upper bound that the page lists. Larger bounds only catch typing errors."""
FEWEST_COMMANDS = 2
"""A flag with the same text in at least this many commands is listed once."""
TYPE_NAMES = {"integer": "Integer", "number": "Number", "string": "Text", "boolean": "Boolean"}
"""Word for each type of JSON schema."""
BOUNDS = {"exclusiveMinimum": "above", "minimum": "from", "exclusiveMaximum": "to below", "maximum": "to"}
"""Words for each bound of JSON schema, lower bounds first."""
SIGNS = {"from 0": "non-negative", "above 0": "positive"}
"""Adjective for a number whose only bound is 0."""
SETTINGS_HEAD = f"""# Configuration reference

{MADE_BY}

A run's settings are in a TOML file with the sections below. The file needs only the settings that differ from the
defaults. On the command line, `--section.key VALUE` after the file's name overrides a setting:

- `txl train CONFIG.toml --optim.lr 1e-3` sets a number. Texts are set in the same way.
- `--model.cutoffs 1000 5000` sets a list. Without values the flag sets an empty list.
- `--checkpoint.keep_best` sets true, and `--checkpoint.keep_best False` sets false.

Sizes are global: they do not depend on the number of ranks. The last line of an entry says what happens if you change
the setting and [resume the run](checkpoints.md#resuming-with-other-settings):

- **Frozen.** The resumed run refuses another value.
- **A resume warns.** The resumed run uses the new value and logs a warning.
- No note: the resumed run uses the new value.
"""
RESUME_NOTES = {"frozen": " Frozen.", "warned": " A resume warns.", "free": ""}
"""Note of an entry, by the policy of its setting."""
COMMANDS_HEAD = f"""# Command reference

{MADE_BY}

`python -m txl_dist COMMAND` is the same as `txl COMMAND`, and `txl COMMAND --help` prints this page's texts. Defaults
are in brackets. A flag without brackets is off or empty by default. A flag `--name` without a value has an opposite,
`--no-name`.

[Troubleshooting](troubleshooting.md#exit-codes) explains the exit codes.
"""
COMPLETION = """`txl completion SHELL` writes a script that completes commands, flags, settings, choices and file names
when TAB is pressed. SHELL is bash, zsh or fish. Write the script again after an update of
txl_dist.

<!-- not run: installs -->
```bash
txl completion bash > ~/.local/share/bash-completion/completions/txl
txl completion zsh > ~/.zfunc/_txl        # with fpath+=(~/.zfunc) before compinit in ~/.zshrc
txl completion fish > ~/.config/fish/completions/txl.fish
```
"""


def settings_page() -> str:
    """Return the Markdown of docs/settings.md. Each setting has a heading, so that it can be linked and searched."""
    parts = [SETTINGS_HEAD]
    for section, info in Config.model_fields.items():
        schema = type(info.default).model_json_schema()
        parts.append(f"## {section}\n")
        for key, field in schema["properties"].items():
            note = RESUME_NOTES[resume_policy(f"{section}.{key}")]
            facts = f"{_type_and_default(field)}.{note}"
            parts.append(f"### {section}.{key}\n\n{_escaped(field['description'])}\n\n*{facts}*\n")
    return "\n".join(parts)


class HelpEntry(NamedTuple):
    """An argument in the help of a command."""

    spelling: str
    """Flag with the kind of its value, or the kind of a positional argument."""
    text: str

    @property
    def is_flag(self) -> bool:
        """Whether the entry is a flag and not a positional argument."""
        return self.spelling.startswith("-")


class CommandHelp(NamedTuple):
    """Help of a command, divided into its description and its arguments."""

    description: str
    entries: list[HelpEntry]


def commands_page() -> str:
    """Return the Markdown of docs/commands.md: the flags that several commands share, then the help of each command
    without them."""
    helps = {command: _parse_help(help_text(command)) for command in COMMANDS if command != "launch"}
    commands_of_flag: dict[HelpEntry, list[str]] = {}
    for command, parsed in helps.items():
        for entry in parsed.entries:
            commands_of_flag.setdefault(entry, []).append(command)
    common = {}
    for entry, commands in commands_of_flag.items():
        if entry.is_flag and len(commands) >= FEWEST_COMMANDS:
            common[entry] = commands
    parts = [COMMANDS_HEAD, "## Common flags\n\n```text"]
    for entry, commands in common.items():
        if entry.spelling == "--help":
            continue
        parts.append(_wrapped(entry._replace(text=f"{entry.text} For {', '.join(commands)}.")))
    parts.append("```\n")
    for command in COMMANDS:
        if command == "completion":
            parts.append(f"## {command}\n\n{COMPLETION}")
            continue
        lines = [help_text(command).strip()]
        if command in helps:
            lines = _command_lines(command, helps[command], common)
        parts.append("\n".join([f"## {command}\n\n```text", *lines, "```\n"]))
    return "\n".join(parts)


def _command_lines(command: str, parsed: CommandHelp, common: Collection[HelpEntry]) -> list[str]:
    """Return the lines of a command: usage, description, and the entries that are not in `common`."""
    entries = [entry for entry in parsed.entries if entry not in common]
    if command == "train":
        entries = [entry for entry in entries if not entry.spelling.startswith("--") or "." not in entry.spelling]
        entries.append(HelpEntry("--section.key=VALUE", "Any setting: see the configuration reference."))
    positional = [entry.spelling for entry in entries if not entry.is_flag]
    usage = " ".join(["txl", command, *positional, "[FLAGS]"])
    return [usage, "", parsed.description, "", *map(_wrapped, entries)]


def _parse_help(text: str) -> CommandHelp:
    """Parse the help of a command: usage and description, then sections, each with a heading above a rule."""
    lines = [line.rstrip().removeprefix(" ") for line in text.splitlines()]
    headings = [index - 1 for index, line in enumerate(lines) if re.fullmatch("-{5,}", line)]
    usage_and_description = "\n".join(lines[: headings[0]])
    description = usage_and_description.partition("\n\n")[2].strip()
    entries: list[HelpEntry] = []
    for line in lines[headings[0] :]:
        begins_entry = re.match(r" ((?:--?\w|[\[{]|[A-Z]{2}).*?)(?: {2,}(.*))?$", line)
        if begins_entry:
            entries.append(HelpEntry(begins_entry[1], begins_entry[2] or ""))
        elif line.startswith("  ") and entries:
            spelling, meaning = entries.pop()
            entries.append(HelpEntry(spelling, f"{meaning} {line.strip()}".strip()))
    return CommandHelp(description, [_plain_entry(entry) for entry in entries])


def _plain_entry(entry: HelpEntry) -> HelpEntry:
    """Return an entry without the notation of tyro. All positional arguments are required, so the mark `[required]` is
    removed."""
    plain = HelpEntry(_plain_spelling(entry.spelling), _plain_default(entry.text))
    if plain.is_flag:
        return plain
    return plain._replace(text=plain.text.removesuffix(" [required]"))


def _plain_spelling(spelling: str) -> str:
    """Return an argument without the notation of tyro: `--out {None}|PATH` becomes `--out=PATH`."""
    spelling = re.sub(r"\[*(\w+) \[\1 \.\.\.\]+", r"\1 ...", spelling)
    spelling = re.sub(r"^(?:-\w, )?(--[\w-]+), --no-.*", r"\1", spelling)
    spelling = spelling.replace("{None}|", "").replace("-h, --help", "--help")
    spelling = re.sub(r"^(--\S+) (\S+)$", r"\1=\2", spelling)
    return re.sub(r"^\[(\w+)\]$", r"\1", spelling)


def _plain_default(text: str) -> str:
    """Return the text with its default in brackets. A default that is empty or off is removed."""
    text, mark, default = text.rpartition(" (default: ")
    default = default.removesuffix(")")
    if not mark:
        return default.replace("(required", "[required]")
    return text if default in ("", "''", "None", "False", "CONFIG") else f"{text} [{default}]"


def _wrapped(entry: HelpEntry) -> str:
    """Return an entry in lines of at most 110 columns. The lines after the first are indented."""
    return textwrap.fill(
        f"{entry.spelling}  {entry.text}", 110, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def help_text(command: str) -> str:
    """Return the output of `txl COMMAND --help` into a pipe: 100 columns of ASCII, without colour."""
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        main([command, "--help"])
    return printed.getvalue()


def _type_and_default(field: dict[str, Any]) -> str:
    """Return the type of a setting in words, with its choices or bounds, and its default."""
    if "enum" in field:
        others = ", ".join(f"`{choice}`" for choice in field["enum"] if choice != field["default"])
        return f"`{field['default']}` (default), {others}"
    if field["type"] == "boolean":
        return f"Default {_default(field['default'])}"
    return f"{_type(field)}, default {_default(field['default'])}"


def _type(field: dict[str, Any]) -> str:
    """Return the type of a setting in words, with its bounds."""
    if "prefixItems" in field:
        return f"List of {len(field['prefixItems'])}: {_lower_first(_type(field['prefixItems'][0]))}"
    if field["type"] == "array":
        return f"List: {_lower_first(_type(field['items']))}"
    name, bounds = TYPE_NAMES[field["type"]], _bounds(field)
    if bounds in SIGNS:
        return f"{SIGNS[bounds].capitalize()} {_lower_first(name)}"
    return f"{name} {bounds}".strip()


def _bounds(field: dict[str, Any]) -> str:
    """Return the lower and the upper bound of a number in words, without very high bounds."""
    bounds = []
    for mark, words in BOUNDS.items():
        if mark in field and field[mark] <= HIGHEST_SHOWN:
            bounds.append(f"{words} {field[mark]:g}")
    return " ".join(bounds)


def _lower_first(text: str) -> str:
    return text[0].lower() + text[1:]


def _default(value: Any) -> str:
    if value in ("", []):
        return "empty"
    return f"`{json.dumps(value)}`"


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("*", "\\*").replace("<", "&lt;")


PAGES = {"settings.md": settings_page, "commands.md": commands_page}
"""Pages that are made completely from the code."""


def page_now(name: str) -> str:
    """Return the text of a page of docs/ for the current code. Raises ValueError if a page does not contain the
    comments of its table."""
    if name in PAGES:
        return PAGES[name]()
    title, make_table = TABLES[name]
    return with_table((DOCS / name).read_text(encoding="utf-8"), title, make_table())


def stale_pages() -> list[str]:
    """Return the names of the pages in docs/ that differ from the text for the current code."""
    stale = []
    for name in (*PAGES, *TABLES):
        path = DOCS / name
        if not path.is_file() or path.read_text(encoding="utf-8") != page_now(name):
            stale.append(name)
    return stale


def run() -> int:
    """Write the stale pages, or with --check name them."""
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
