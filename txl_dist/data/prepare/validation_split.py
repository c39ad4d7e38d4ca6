"""How a preparation holds text out where no held-out text is given: whole documents, or the ends of documents.

A hash of its content holds a document out (documents.py), which needs documents enough. Where it leaves a split, or
train, without one, as with a single text file, the end of each document that is long enough is held out instead,
and whatever equals such an end goes where it goes: equal text is never on two sides. Which of the two it is follows
from the content of the inputs alone, and is known before a tokenizer is learnt.

What it gives up: adding documents may turn ends into whole documents; then what is held out is another text. What
can be read but once (stdin, a command) is the same as a file while it is shorter than 64 MiB, or a tokenizer is
learnt from it, so that it is kept; a longer one goes by the hash alone (tokenizing.py), and where that leaves a split
without a document the end of the work says so, but that it is one document, which is said once 64 MiB are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from txl_dist.console.formatting import counted
from txl_dist.data.prepare.documents import SHORTEST_TAIL, SPLITS, TEST, TRAIN, VALID, Document, Reading, pieces_of
from txl_dist.errors import DataError

Documents = Callable[[], Iterator[Document]]
"""Starts a pass over the documents that are given for train."""


class ValidationSplit(NamedTuple):
    """What is held out, and a sentence on it for people."""

    reading: Reading
    remark: str = ""


def no_text(inputs: Sequence[object], reading: Reading) -> DataError:
    """The error where these inputs leave nothing to train on."""
    what = "ids" if reading.names else "text"
    return DataError(f"no {what} for the train split in {named_few(inputs)}. Check the paths and the valid fraction.")


def named_few(inputs: Sequence[object]) -> str:
    """The first names of a list, with a mark where there are more."""
    return ", ".join(map(str, inputs[:3])) + ", ..." * (len(inputs) > 3)


def hold_out(documents: Documents, reading: Reading, *, inputs: Sequence[object]) -> ValidationSplit:
    """Whole documents where that serves every split, else ends.

    One pass, which ends with the first document of the last split; a second one, over few documents, where ends are
    held out. Raises DataError if neither gives every split a text.
    """
    shares = reading.shares
    missing, count = {TRAIN, *shares}, 0
    for document in documents():
        if not document.text.strip():
            continue
        count += 1
        missing -= {piece.split for piece in pieces_of(document, given_for=TRAIN, reading=reading)}
        if not missing:
            return ValidationSplit(reading)
    if not count:
        raise no_text(inputs, reading)

    tails: dict[bytes, str] = {}
    kept: set[bytes] = set()
    cut, longest = [], ""
    for document in documents():
        first, *ends = pieces_of(document, given_for=TRAIN, reading=reading._replace(tails={}))
        kept.add(first.digest)
        tails |= {end.digest: end.split for end in ends if tails.get(end.digest) != TEST}
        cut += [document.where] if ends else []
        longest = max(longest, document.text, key=len)
    if missing := {TRAIN, *shares} - {*tails.values(), *([TRAIN] if kept - tails.keys() else [])}:
        raise _too_little(sorted(missing, key=SPLITS.index)[-1], count=count, longest=longest, reading=reading)
    whose = cut[0] if len(cut) == 1 else f"each of {len(cut):,} documents"
    parts = ", ".join(f"{split} {share:.4g}" for split, share in shares.items())
    remark = (
        f"{count:,} document{'s are' if count > 1 else ' is'} too few to hold out whole ones: the end of {whose} is "
        f"held out ({parts}), cut behind a paragraph, line or word. Held-out text of your own: --valid PATH"
    )
    return ValidationSplit(reading._replace(tails=tails), remark)


def _too_little(split: str, *, count: int, longest: str, reading: Reading) -> DataError:
    shares = reading.shares.values()
    needed = math.ceil(SHORTEST_TAIL / min(*shares, 1 - sum(shares)))
    has, least = f"{counted(len(longest), 'character')}", f"{needed:,}"
    if reading.names:  # each id is a name and a blank
        has, least = (
            f"{counted(longest.count(' '), 'id')}",
            f"about {math.ceil(needed * longest.count(' ') / len(longest)):,}",
        )
    flag = VALID if split == TRAIN else split
    return DataError(
        f"no document fell into the split {split} ({count:,} in all), and the longest has {has}: its end is held out "
        f"from {least} on. Give held-out text with `--{flag} PATH` or another `--{flag}-fraction`, or have no such "
        f"split with `--{flag}-fraction 0`."
    )
