"""Choice of the validation and test splits if the user gives none: hold out whole documents, or the ends of documents.

Normally a hash of a document's content decides its split (documents.py). This rule needs many documents. If the hash
leaves a split without a document, as with a single text file, the end of each document that is long enough is held out
instead. Any other text that is equal to such an end goes to the same split, so that equal text is never in two splits.
Only the content of the inputs decides between the two ways, before a tokenizer is trained.

Limitations: with added documents, whole documents can be held out instead of ends, which changes the validation split.
The end of an input that can be read only once (stdin, a command) is held out in two cases only: the input is shorter
than 64 MiB, or a tokenizer is trained on the input, so that it is stored. For a longer input the hash alone decides. If
a split is then empty, the error is raised at the end. An input that is one document of 64 MiB or more is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from txl_dist.console.formatting import counted
from txl_dist.data.prepare.documents import SHORTEST_TAIL, SPLITS, TEST, TRAIN, VALID, Document, Reading, pieces_of
from txl_dist.errors import DataError

Documents = Callable[[], Iterator[Document]]
"""Function that returns a new iterator over the documents that are given for train. Each call reads the inputs
again."""


class ValidationSplit(NamedTuple):
    """Result of `hold_out`: how text is held out of the documents that are given for train."""

    reading: Reading
    """Options for reading documents. If ends are held out, `tails` contains the digests of the ends."""
    remark: str = ""
    """Sentence for the user about ends that are held out. Empty if whole documents are held out."""


def no_text(inputs: Sequence[object], reading: Reading) -> DataError:
    """Return the error for inputs that contain no text or no ids for the train split."""
    if reading.names:
        what = "ids"
    else:
        what = "text"
    return DataError(
        f"the inputs contain no {what} for the train split: {named_few(inputs)}. Check the paths of the inputs and "
        "the settings `valid_fraction` and `test_fraction`."
    )


def named_few(inputs: Sequence[object]) -> str:
    """Return the first three names of a list for a message, with an ellipsis if there are more."""
    names = ", ".join(str(name) for name in inputs[:3])
    if len(inputs) > 3:
        return f"{names}, ..."
    return names


def hold_out(documents: Documents, reading: Reading, *, inputs: Sequence[object]) -> ValidationSplit:
    """Choose how text is held out of the train documents: whole documents, or the ends of documents.

    Whole documents are held out if every split then gets a document. One pass over the documents checks this, and ends
    as soon as every split has a document. Otherwise a second pass cuts the ends of the documents, which are then few.
    Raises DataError if neither way gives every split a text.
    """
    shares = reading.shares
    missing = {TRAIN, *shares}
    count = 0
    for document in documents():
        if not document.text.strip():
            continue
        count += 1
        pieces = pieces_of(document, given_for=TRAIN, reading=reading)
        missing -= {piece.split for piece in pieces}
        if not missing:
            return ValidationSplit(reading)
    if not count:
        raise no_text(inputs, reading)

    without_tails = reading._replace(tails={})
    tails: dict[bytes, str] = {}
    beginnings: set[bytes] = set()
    places_of_cuts: list[str] = []
    longest = ""
    for document in documents():
        first, *ends = pieces_of(document, given_for=TRAIN, reading=without_tails)
        beginnings.add(first.digest)
        for end in ends:
            if tails.get(end.digest) != TEST:
                tails[end.digest] = end.split
        if ends:
            places_of_cuts.append(document.where)
        longest = max(longest, document.text, key=len)
    filled = set(tails.values())
    if beginnings - tails.keys():
        filled.add(TRAIN)
    unfilled = {TRAIN, *shares} - filled
    empty = [split for split in SPLITS if split in unfilled]
    if empty:
        raise _too_little(empty[-1], count=count, longest=longest, reading=reading)
    remark = _remark_on_ends(places_of_cuts, shares, count=count)
    return ValidationSplit(reading._replace(tails=tails), remark)


def _remark_on_ends(places_of_cuts: Sequence[str], shares: Mapping[str, float], *, count: int) -> str:
    """Return the sentence for the user if only the ends of some of `count` documents are held out."""
    few = "1 document is" if count == 1 else f"{count:,} documents are"
    whose = f"each of {len(places_of_cuts):,} documents"
    if len(places_of_cuts) == 1:
        whose = places_of_cuts[0]
    parts = ", ".join(f"{split} {share:.4g}" for split, share in shares.items())
    return (
        f"{few} too few to hold out whole documents: the end of {whose} is held out ({parts}), cut after a paragraph, "
        "line or word. Give your own validation split with `--valid PATH`."
    )


def _too_little(split: str, *, count: int, longest: str, reading: Reading) -> DataError:
    """Return the error for a split that gets no text, either from whole documents or from ends."""
    shares = reading.shares.values()
    train_share = 1 - sum(shares)
    smallest_share = min(*shares, train_share)
    needed = math.ceil(SHORTEST_TAIL / smallest_share)
    if reading.names:  # each id is a name and a blank
        num_ids = longest.count(" ")
        needed_ids = math.ceil(needed * num_ids / len(longest))
        has = counted(num_ids, "id")
        least = f"about {needed_ids:,} ids"
    else:
        has = counted(len(longest), "character")
        least = f"{needed:,} characters"
    if split == TRAIN:
        flag = VALID
    else:
        flag = split
    return DataError(
        f"the split {split} got no document. Number of documents in the inputs: {count:,}. The longest document has "
        f"{has}. The end of a document can be held out only if the document has at least {least}. Give text for the "
        f"split {flag} with `--{flag} PATH`, or change `--{flag}-fraction`, or prepare without the split {flag} with "
        f"`--{flag}-fraction 0`."
    )
