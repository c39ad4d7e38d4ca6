"""Ids that are there already, each with a name of a list: music events, residues of proteins, lines of logs.

A document of such ids is prepared as the text of their names with a blank behind each, so that all that is done with
text is done with it. The ids stay what they are: the list is the vocabulary in order, and end-of-text stands behind its
last name. A model writes names, and is asked with names.

What it gives up: cutoffs of adaptive softmax want the most frequent ids first, and whoever makes the list orders it.
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
    """One id per name between blanks, no marks of lines; a name that is not in the list is refused."""

    kind = "listed"
    unit = "token"
    spells_text = False
    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, symbols: Sequence[str], *, end_of_text: int | None) -> None:
        super().__init__(symbols, end_of_text=end_of_text, line_end=None, unknown=None)


def listed_tokenizer(names: Sequence[str], *, end_of_text: bool) -> ListedTokenizer:
    """Of the names of the ids, in order."""
    return ListedTokenizer([*names, *[END_OF_TEXT] * end_of_text], end_of_text=len(names) if end_of_text else None)


def read_names(path: str | Path) -> tuple[str, ...]:
    """The names of a list, one a line, that of id 0 first; a byte order mark is no part of it.

    Raises DataError naming the line for what is no name.
    """
    remedy = "Give a UTF-8 file with a token's name in each line, that of id 0 first."
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
            problem = f"is {name!r:.80}, and names are told apart by blanks"
        elif name == END_OF_TEXT:
            problem = f"is {END_OF_TEXT}, which is put behind the last name by itself"
        elif name in first_of:
            problem = f"is {name!r:.80}, as line {first_of[name]} is"
        else:
            first_of[name] = number
            continue
        raise DataError(f"{path}, line {number}: the name of id {number - 1} {problem}. {remedy}")
    if len(lines) > MOST_IDS:
        raise DataError(f"{path} has {len(lines):,} names; a vocabulary has at most {MOST_IDS:,}.")
    return tuple(lines)
