"""What a loss may be called: bits per byte of text only where it is what the text costs.

Nats per token are a cost of tokens. They are that of the text, and comparable between tokenizers, if every token is
scored and the tokens spell all of the text, byte for byte: of a held-out split all of it, since a part of it is another
text, of a size that nobody counted. `text_units` alone decides that; whoever shows, records or
compares losses asks it, or reads what it had recorded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from txl_dist.data.loader.corpus import Split


class TextUnits(NamedTuple):
    """In which units a mean loss in nats per token may be told: it is a cost of the text only if the tokens spell all
    of the text, and every token is scored."""

    bytes_per_token: float
    characters_per_token: float
    problem: str
    """Why a loss is no cost of the text in bits, for people; empty where it is."""
    token: str
    """What a token is, for people: token or word."""
    unknown_pct: float
    """Share of the tokens that stand for something unknown."""

    def bits(self, loss: float) -> dict[str, float]:
        """`bits_per_byte` and `bits_per_character` of the text; nothing where a loss is no cost of it.

        Exact when the loss is that of the whole split: the tokens, end-of-text among them, spell all of its text.
        Its first token, which nothing predicts, counts like an average one. For the loss of the text trained on, a
        part of its split, it is an estimate: that text may have more or fewer bytes per token.
        """
        if self.problem:
            return {}
        bits = loss / math.log(2)
        return {"bits_per_byte": bits / self.bytes_per_token, "bits_per_character": bits / self.characters_per_token}

    def told(self, loss: float) -> dict[str, float]:
        """For records: bits, if they are the cost of the text, `ppl` per token, `unknown_pct` if something is."""
        unknown = {"unknown_pct": self.unknown_pct} if self.unknown_pct else {}
        return {"ppl": math.exp(min(loss, 700.0)), **self.bits(loss), **unknown}


def text_units(
    splits: Sequence[Split],
    *,
    shares: Sequence[float] = (1.0,),
    mask_documents: bool,
    max_tokens: int = 0,
    half_loss: bool = False,
) -> TextUnits:
    """For losses over splits of which each has this share of the tokens; one split has all.

    `max_tokens`: no more than so many tokens of a split are scored; 0 means all. `half_loss`: of each segment only the
    recent half is.
    Raises DataError if a tokenizer, or counts that are needed, cannot be read.
    """
    parts = list(zip(splits, shares, strict=True))
    problems = [_problem_of(split, mask_documents=mask_documents, max_tokens=max_tokens) for split in splits]
    if half_loss:
        problems.append("only the recent half of each segment is scored (train.half_loss)")
    return TextUnits(
        bytes_per_token=sum(share * split.text_bytes / split.tokens for split, share in parts),
        characters_per_token=sum(share * split.text_characters / split.tokens for split, share in parts),
        problem=next(filter(None, problems), ""),
        token=splits[0].corpus.tokenizer.unit,
        unknown_pct=sum(100 * share * split.num_unknown / split.tokens for split, share in parts),
    )


def word_count(split: Split) -> int:
    """Words of a split's text: its runs of anything but whitespace (`str.split`), and one for each end-of-text, as the
    field counts <eos>. Only of a split whose text its tokens give back.

    The perplexity per word of a model is exp(nats of all tokens / words): it compares tokenizers, as bits per byte do.
    Reads and decodes the whole split. Raises DataError if it is damaged.
    """
    tokenizer, end, words = split.corpus.tokenizer, split.corpus.end_of_text, 0
    for document in split.each_document():
        ids = document.tolist()
        is_ended = ids[-1] == end
        words += len(tokenizer.decode(ids[:-1] if is_ended else ids).split()) + is_ended
    return words


def _problem_of(split: Split, *, mask_documents: bool, max_tokens: int) -> str:
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
    return f"{where}: {split.lost}" if split.lost else ""
