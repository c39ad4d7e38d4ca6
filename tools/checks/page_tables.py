"""Tables in hand-written pages that are made from the code: the public names and the reading list.

`reference_pages` writes each table between two comments in a page:

    <!-- table: NAME (made by `python -m tools.checks.reference_pages`) -->
    <!-- end of table -->

Change PUBLIC_MEMBERS, PLUGIN_MODULE or READING below to change the contents of a table.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import txl_dist
from tools.checks.count_code import code_lines
from tools.checks.sources import PACKAGE, ROOT, Definition, parse

PUBLIC_MEMBERS: dict[str, tuple[str, ...]] = {
    "Corpus": ("split_names", "split", "tokenizer", "lanes", "webdataset"),
    "LanguageModel": (
        *("encode", "decode", "score", "score_batch", "generate", "generate_batch", "stream", "stream_batch"),
        *("memory", "load_memory", "empty_memory", "hidden", "network", "tokenizer"),
    ),
    "RunResult": ("exit_code",),
    "TransformerXL": ("empty_memory", "forward"),
}
"""Public methods and properties of the public classes."""
BASES = {"Corpus": ("CorpusIndex", "data.loader.shards")}
"""(base class, module) of the public classes that inherit public members."""
PLUGIN_MODULE = "plugins"
"""Public module whose functions the table of public names contains."""


class Reading(NamedTuple):
    """One row of the reading list."""

    title: str
    purpose: str
    files: tuple[str, ...]
    """Paths in the package. A `*` matches any name."""


READING = (
    Reading("settings", "every setting, its unit and its bounds", ("config/schema.py",)),
    Reading(
        "basics",
        "random numbers, collectives, tensor files",
        ("rng.py", "distributed/collectives.py", "io/tensor_files.py"),
    ),
    Reading(
        "lanes and stream",
        "which token a lane reads, and the state that resumes it; read `lanes.py` first",
        (
            *("data/format.py", "data/loader/lanes.py", "data/loader/stream_state.py", "data/loader/stream.py"),
            *("data/loader/shards.py", "data/loader/corpus.py"),
        ),
    ),
    Reading(
        "model core",
        "memory, relative attention, block, adaptive softmax, network",
        (
            *("vocabulary_clusters.py", "model/memory.py", "model/positions.py", "model/relative_attention.py"),
            *("model/attention.py", "model/block.py", "model/dropout.py"),
            *("model/adaptive_embedding.py", "model/adaptive_softmax.py", "model/transformer_xl.py"),
        ),
    ),
    Reading(
        "engine",
        "how DeepSpeed is used, what each rank holds",
        (
            *("train/engine/protocol.py", "train/engine/deepspeed_config.py", "train/engine/optimizer.py"),
            *("train/engine/flat.py", "train/engine/partitions.py", "train/engine/zero.py"),
        ),
    ),
    Reading(
        "training",
        "state, batch, step, loop, and the start that builds them",
        (
            *("train/state.py", "train/batch.py", "train/schedule.py", "train/stepper.py", "train/loop.py"),
            *("train/run_plan.py", "train/start.py"),
        ),
    ),
    Reading(
        "checkpoint",
        "writing, checking, choosing and reading",
        (
            *("train/checkpoint/fragments.py", "train/checkpoint/memories.py", "train/checkpoint/writer.py"),
            *("train/checkpoint/validate.py", "train/checkpoint/read.py"),
            "train/checkpoint/manager.py",
        ),
    ),
)
"""The core of the package, which one person can read in an evening, in the order for reading."""
FEWEST_LINES, MOST_LINES = 4000, 6000
"""Smallest and largest size of the reading list, in lines of code."""


def reading_lines() -> dict[str, int]:
    """Count the lines of code of each file of the reading list, by path in the package.

    Raises ValueError for a pattern in READING that no file matches.
    """
    lines: dict[str, int] = {}
    for reading in READING:
        lines |= _lines_of_row(reading)
    return lines


def _lines_of_row(reading: Reading) -> dict[str, int]:
    """Count the lines of code of each file in one row. Raises ValueError for a pattern that no file matches."""
    lines: dict[str, int] = {}
    for pattern in reading.files:
        paths = sorted((ROOT / PACKAGE).glob(pattern))
        if not paths:
            raise ValueError(f"no file {pattern} in {PACKAGE}/. Correct READING in tools/checks/page_tables.py.")
        for path in paths:
            lines[path.relative_to(ROOT / PACKAGE).as_posix()] = code_lines(path.read_text(encoding="utf-8"))
    return lines


def reading_table() -> str:
    """Make the Markdown table of the reading list, with the sum in its last row."""
    lines: dict[str, int] = {}
    rows = ["| read | for | files of `txl_dist/`, with lines of code | lines |", "|---|---|---|---|"]
    for reading in READING:
        files = _lines_of_row(reading)
        lines |= files
        shown = ", ".join(f"`{name}` {count}" for name, count in files.items())
        rows.append(f"| {reading.title} | {reading.purpose} | {shown} | {sum(files.values()):,} |")
    rows.append(f"| sum | | {len(lines)} files | {sum(lines.values()):,} |")
    return "\n".join(rows)


def public_names_table() -> str:
    """Make the Markdown table of the public names, each with its signature and the first sentence of its docstring."""
    rows = ["| name in `txl_dist` | meaning |", "|---|---|"]
    for name, module in sorted(txl_dist._HOME.items(), key=lambda item: item[0].lower()):
        definition = _definition(name, module)
        rows.append(_row(name, definition))
        for member in PUBLIC_MEMBERS.get(name, ()):
            assert isinstance(definition, ast.ClassDef)
            body = list(definition.body)
            if name in BASES:
                base = _definition(*BASES[name])
                assert isinstance(base, ast.ClassDef)
                body += base.body
            rows.append(_row(f".{member}", _member(name, body, member)))
    for function in _functions(PLUGIN_MODULE):
        rows.append(_row(f"{PLUGIN_MODULE}.{function.name}", function))
    return "\n".join(rows)


def _definition(name: str, module: str) -> Definition:
    """Return the class or function that a module of the package defines. Raises ValueError if the module does not
    define it."""
    path = ROOT / PACKAGE / f"{module.replace('.', '/')}.py"
    for node in parse(path).body:
        if isinstance(node, Definition) and node.name == name:
            return node
    raise ValueError(f"{path.relative_to(ROOT)} defines no {name}.")


def _member(owner: str, body: Sequence[ast.stmt], name: str) -> Definition:
    """Return a method or property from the body of the class `owner`. Raises ValueError if there is none of this
    name."""
    for node in body:
        if isinstance(node, Definition) and node.name == name:
            return node
    raise ValueError(f"{owner} has no {name}. Correct PUBLIC_MEMBERS in tools/checks/page_tables.py.")


def _functions(module: str) -> list[ast.FunctionDef]:
    """Return the public functions that a module of the package defines, in source order."""
    body = parse(ROOT / PACKAGE / f"{module}.py").body
    return [node for node in body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def _row(name: str, definition: Definition) -> str:
    return f"| `{name}{_parameters(definition)}` | {first_sentence(definition)} |"


def _parameters(definition: Definition) -> str:
    """Return the parameters in parentheses, without types and `self`. The text is empty for a property or a plain
    class."""
    if isinstance(definition, ast.ClassDef):
        return _fields(definition)
    decorators = {ast.unparse(decorator) for decorator in definition.decorator_list}
    if decorators & {"property", "cached_property"}:
        return ""
    arguments = definition.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    shown = re.sub(r"^self(, )?", "", ast.unparse(arguments))
    return f"({shown})"


def _fields(definition: ast.ClassDef) -> str:
    """Return the arguments of a class in parentheses: those of its constructor, or the fields of a named tuple."""
    for node in definition.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return _parameters(node)
    if "NamedTuple" not in {ast.unparse(base) for base in definition.bases}:
        return ""
    names = [ast.unparse(node.target) for node in definition.body if isinstance(node, ast.AnnAssign)]
    return f"({', '.join(names)})"


def first_sentence(definition: Definition) -> str:
    """Return the first sentence of a docstring in one line for a table."""
    docstring = ast.get_docstring(definition) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    sentence = re.split(r"(?<=\.) (?=[A-Z`])", paragraph, maxsplit=1)[0]
    return sentence.replace("|", "\\|").removesuffix(".")


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "api.md": ("public names", public_names_table),
    "architecture.md": ("reading list", reading_table),
}
"""Name of the table in each page, and the function that makes the table."""


def with_table(page: str, title: str, table: str) -> str:
    """Return the text of a page with a table between its comments. Raises ValueError if the page does not contain the
    comments."""
    begin = f"<!-- table: {title} (made by `python -m tools.checks.reference_pages`) -->\n"
    end = "<!-- end of table -->"
    before, mark, rest = page.partition(begin)
    _, end_mark, after = rest.partition(end)
    if not mark or not end_mark:
        raise ValueError(f"the page has no marks of the table {title!r}: write {begin.strip()} and {end}.")
    return f"{before}{begin}\n{table}\n\n{end}{after}"
