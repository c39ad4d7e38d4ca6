"""Tokenizer for ids that exist already, each with a name from a list: music events, protein residues, log lines.

A document of such ids is prepared as a text: the names of the ids with a blank after each name. So all code for text
works with such documents. The ids do not change: the list is the vocabulary in order, and end-of-text follows the last
name. Prompts and generated texts consist of names.

Limitations: ids are in the order of the list, but adaptive softmax needs ids in order of frequency.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from txl_dist.errors import DataError, translate_errors
from txl_dist.io.files import read_text
from txl_dist.tokenizers.base import END_OF_TEXT
from txl_dist.tokenizers.learning import MOST_IDS
from txl_dist.tokenizers.word_tokenizer import WordTokenizer


class ListedTokenizer(WordTokenizer):
    """Tokenizer for a list of names, with one id per name between blanks and no line marks.

    A name that is not in the list raises DataError.
    """

    kind = "listed"
    unit = "token"
    spells_text = False
    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, symbols: Sequence[str], *, end_of_text: int | None) -> None:
        super().__init__(symbols, end_of_text=end_of_text, line_end=None, unknown=None)


def listed_tokenizer(names: Sequence[str], *, end_of_text: bool) -> ListedTokenizer:
    """Return the tokenizer for names in the order of their ids. With `end_of_text` the last id is end-of-text."""
    if end_of_text:
        return ListedTokenizer([*names, END_OF_TEXT], end_of_text=len(names))
    return ListedTokenizer(names, end_of_text=None)


def read_names(path: str | Path) -> tuple[str, ...]:
    """Return the names in a list with one name per line, beginning with the name of id 0.

    A byte order mark is skipped. Raises DataError with the number of the line if a line is not a name or repeats a
    name.
    """
    remedy = "Give a UTF-8 file with one name per line, beginning with the name of id 0."
    with translate_errors(
        DataError, f"cannot read the vocabulary list {path}", remedy, of=(OSError, UnicodeDecodeError)
    ):
        lines = read_text(Path(path)).removesuffix("\n").split("\n")
    lines = [line.removesuffix("\r") for line in lines]
    first_of: dict[str, int] = {}
    for number, name in enumerate(lines, start=1):
        if not name:
            problem = "is empty"
        elif name.split() != [name]:
            problem = f"is {name!r:.80}, but a name cannot contain blanks"
        elif name == END_OF_TEXT:
            problem = f"is {END_OF_TEXT}, which is added after the last name automatically"
        elif name in first_of:
            problem = f"is {name!r:.80}, but line {first_of[name]} has the same name"
        else:
            first_of[name] = number
            continue
        raise DataError(f"{path}, line {number}: the name of id {number - 1} {problem}. {remedy}")
    if len(lines) > MOST_IDS:
        raise DataError(f"{path} has {len(lines):,} names, but a vocabulary has at most {MOST_IDS:,} names.")
    return tuple(lines)
