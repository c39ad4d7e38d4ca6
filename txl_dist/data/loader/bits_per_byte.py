"""Units in which a loss may be reported: bits per byte only if the loss measures the whole text.

A loss in nats per token depends on the tokenizer. It can be converted to bits per byte of text if every token is scored
and the tokens spell the whole text, byte for byte. Only then can losses of different tokenizers be compared. If only a
part of a split is scored, the number of bytes in that part is not known. `text_units` alone decides which units a loss
has. All code that shows, records or compares losses uses the result of `text_units`, or a record of this result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from txl_dist.data.loader.shards import Split


class TextUnits(NamedTuple):
    """Units in which a mean loss in nats per token may be reported, as `text_units` decides."""

    bytes_per_token: float
    """Mean bytes of text per token."""
    characters_per_token: float
    """Mean characters of text per token."""
    problem: str
    """Reason why a loss cannot be given in bits per byte, for messages. Empty if bits per byte are valid."""
    token: str
    """Noun that messages use for one id of the vocabulary: "token" or "word"."""
    unknown_pct: float
    """Percentage of the tokens that are the unknown symbol (such as `<unk>`), from 0 to 100."""

    def bits(self, loss: float) -> dict[str, float]:
        """Return `bits_per_byte` and `bits_per_character` for a loss in nats per token, or an empty dict if `problem`
        is set.

        For the loss of a whole split the values are exact, because its tokens, end-of-text included, spell all of the
        text. The first token of the split has no prediction and no loss, so its loss is assumed to be the mean loss. A
        training loss covers only a part of the split, so its values are estimates: that part can have more or fewer
        bytes per token.
        """
        if self.problem:
            return {}
        bits_per_token = loss / math.log(2)
        return {
            "bits_per_byte": bits_per_token / self.bytes_per_token,
            "bits_per_character": bits_per_token / self.characters_per_token,
        }

    def metrics(self, loss: float) -> dict[str, float]:
        """Return the metrics to record for a loss in nats per token.

        The metrics are `ppl` (perplexity per token), bits per byte and per character if they are valid, and
        `unknown_pct` if any token is the unknown symbol.
        """
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
    unscored: str = "",
) -> TextUnits:
    """Decide in which units losses over `splits` may be reported.

    `shares` are the fractions of the scored tokens that come from each split. At most `max_tokens` tokens of a split
    are scored, and 0 means all tokens. If some targets are not scored for another reason, `unscored` says why.
    Otherwise it is empty. Raises DataError if a tokenizer, or a file of token counts that is needed, cannot be read.
    """
    parts = list(zip(splits, shares, strict=True))
    problems = [_problem_of(split, mask_documents=mask_documents, max_tokens=max_tokens) for split in splits]
    problems.append(unscored)
    first_problem = next(filter(None, problems), "")
    return TextUnits(
        bytes_per_token=sum(share * split.text_bytes / split.tokens for split, share in parts),
        characters_per_token=sum(share * split.text_characters / split.tokens for split, share in parts),
        problem=first_problem,
        token=splits[0].corpus.tokenizer.unit,
        unknown_pct=sum(100 * share * split.num_unknown / split.tokens for split, share in parts),
    )


def word_count(split: Split) -> int:
    """Return the number of words in a split's text, plus one for each end-of-text token.

    End-of-text counts as a word because published figures count `<eos>`. A word is a run of characters other than
    whitespace (`str.split`). The tokens of the split must spell the whole text. A model's perplexity per word is
    exp(total nats of all tokens / words). Like bits per byte, it can be compared between tokenizers. The function reads
    and decodes the whole split. Raises DataError if the split is damaged.
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
    """Return the reason why losses over a split do not measure its whole text, or an empty text if they do."""
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
