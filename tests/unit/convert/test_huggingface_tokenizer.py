"""The tokenizer that transformers loads gives our ids and texts, and begins a text as the model does."""

from __future__ import annotations

import pytest

from txl_dist.convert.huggingface_tokenizer import library_tokenizer
from txl_dist.tokenizers.base import END_OF_TEXT
from txl_dist.tokenizers.training import train_tokenizer

TEXTS = ["the cat sat on the mat,\n  it's 12 o'clock \u00e9\u4e2d.\n\nThe dog did not <unk> see\n"] * 20


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("byte", {}),
        ("byte", {"observed_symbols": True}),
        ("char", {}),
        ("char", {"lower_case": True}),
        ("word", {}),
        ("word", {"lower_case": True}),
        ("bpe", {"vocab_size": 300}),
        ("unigram", {"vocab_size": 300}),
    ],
)
def test_each_kind_of_ours_can_be_said_there(kind: str, settings: dict) -> None:
    ours = train_tokenizer(kind, lambda: TEXTS, **settings)
    theirs = library_tokenizer(ours, begins_documents=True)
    assert theirs is not None
    assert theirs.token_to_id(END_OF_TEXT) == ours.end_of_text
    for text in (*TEXTS[:1], "a cat", "cat\n", "", "the  the\n\nthe"):
        ids = [int(i) for i in ours.encode_prompt(text)]
        assert theirs.encode(text).ids == [ours.end_of_text, *ids]
        assert theirs.decode(ids, skip_special_tokens=False) == ours.decode(ids)
    without = library_tokenizer(ours, begins_documents=False)
    assert without is not None
    assert without.encode("the").ids == list(ours.encode_prompt("the"))


def test_the_spelling_of_the_end_of_text_is_text() -> None:
    ours = train_tokenizer("bpe", lambda: TEXTS, vocab_size=300)
    theirs = library_tokenizer(ours, begins_documents=False)
    assert theirs is not None
    assert theirs.encode(END_OF_TEXT).ids == list(ours.encode(END_OF_TEXT))


def test_what_would_give_other_ids_is_not_written() -> None:
    ours = train_tokenizer("word", lambda: TEXTS, double_eos=True)
    assert library_tokenizer(ours, begins_documents=True) is None
