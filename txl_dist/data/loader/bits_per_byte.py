"""Units of a loss: bits per byte only where the loss is the cost of the whole text.

A loss in nats per token is a cost of tokens. It is the cost of the text, and comparable between tokenizers, if every
token is scored and the tokens spell all of the text, byte for byte. Part of a split is another text, whose size
nobody counted. `text_units` alone decides which units a loss has. All code that shows, records or compares losses
uses its result or a record of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from txl_dist.data.loader.corpus import Split


class TextUnits(NamedTuple):
    """Units in which a mean loss in nats per token may be reported."""

    bytes_per_token: float
    """Mean bytes of text per token."""
    characters_per_token: float
    """Mean characters of text per token."""
    problem: str
    """Reason why a loss is not the cost of the text in bits, for messages; empty where it is."""
    token: str
    """Unit of a token, for messages: token or word."""
    unknown_pct: float
    """Percentage of the tokens that stand for something unknown."""

    def bits(self, loss: float) -> dict[str, float]:
        """Return `bits_per_byte` and `bits_per_character` of the text; nothing where the loss is not its cost.

        The values are exact for the loss of a whole split, whose tokens, end-of-text included, spell all of its text.
        Its first token, which nothing predicts, counts like an average one. For a training loss, over a part of the
        split, they are estimates: that part may have more or fewer bytes per token.
        """
        if self.problem:
            return {}
        bits_per_token = loss / math.log(2)
        return {
            "bits_per_byte": bits_per_token / self.bytes_per_token,
            "bits_per_character": bits_per_token / self.characters_per_token,
        }

    def metrics(self, loss: float) -> dict[str, float]:
        """Return the values to record: `ppl` per token, `bits` if defined, `unknown_pct` if any token is unknown."""
        if self.unknown_pct:
            unknown = {"unknown_pct": self.unknown_pct}
        else:
            unknown = {}
        return {"ppl": math.exp(min(loss, 700.0)), **self.bits(loss), **unknown}


def text_units(
    splits: Sequence[Split],
    *,
    shares: Sequence[float] = (1.0,),
    mask_documents: bool,
    max_tokens: int = 0,
    half_loss: bool = False,
) -> TextUnits:
    """Decide the units of losses over splits. `shares` are each split's share of the scored tokens.

    At most `max_tokens` tokens of a split are scored; 0 means all. With `half_loss` only the recent half of each
    segment is scored. Raises DataError if a tokenizer, or counts that are needed, cannot be read.
    """
    parts = list(zip(splits, shares, strict=True))
    problems = [_problem_of(split, mask_documents=mask_documents, max_tokens=max_tokens) for split in splits]
    if half_loss:
        problems.append("only the recent half of each segment is scored (train.half_loss)")
    first_problem = next(filter(None, problems), "")
    return TextUnits(
        bytes_per_token=sum(share * split.text_bytes / split.tokens for split, share in parts),
        characters_per_token=sum(share * split.text_characters / split.tokens for split, share in parts),
        problem=first_problem,
        token=splits[0].corpus.tokenizer.unit,
        unknown_pct=sum(100 * share * split.num_unknown / split.tokens for split, share in parts),
    )


def word_count(split: Split) -> int:
    """Count the words of a split's text, plus one for each end-of-text, as published figures count <eos>.

    A word is a run of anything but whitespace (`str.split`). The tokens must spell the whole text. A model's perplexity
    per word is exp(nats of all tokens / words), which is comparable between tokenizers, as bits per byte are. Reads and
    decodes the whole split. Raises DataError if it is damaged.
    """
    tokenizer = split.corpus.tokenizer
    end_of_text = split.corpus.end_of_text
    num_words = 0
    for document in split.each_document():
        ids = document.tolist()
        if ids[-1] == end_of_text:
            ids.pop()
            num_words += 1
        num_words += len(tokenizer.decode(ids).split())
    return num_words


def _problem_of(split: Split, *, mask_documents: bool, max_tokens: int) -> str:
    """Return why losses over a split are not the cost of its text; empty if they are."""
    where = f"{split.corpus.name} ({split.name})"
    if not split.text_bytes or not split.text_characters:
        return f"{where} holds no text"
    if 0 < max_tokens < split.tokens:
        return f"only the first {max_tokens:,} of the {split.tokens:,} tokens of {where} are scored (eval.max_tokens)"
    if mask_documents and not split.is_separated:
        return (
            f"documents of {where} have no end-of-text before them: with data.document_mask=True their first "
            "tokens are not scored"
        )
    if split.lost:
        return f"{where}: {split.lost}"
    return ""
