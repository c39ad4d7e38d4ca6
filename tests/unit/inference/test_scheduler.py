"""Concurrent texts: prompts are added and removed, are read while others generate, and each text is as if it were
alone."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.language import TEXT, random_model
from txl_dist.inference.language_model import LanguageModel
from txl_dist.inference.options import SamplingParams
from txl_dist.inference.scheduler import OutputChunk, Scheduler

GREEDY = {"temperature": 0.0, "max_tokens": 10}


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return random_model()


def drained(writer: Scheduler) -> list[OutputChunk]:
    pieces = []
    while writer.num_texts:
        pieces += writer.step()
    return pieces


def text_of(pieces: list[OutputChunk], key: int, sample: int = 0) -> str:
    return "".join(piece.text for piece in pieces if (piece.prompt, piece.sample) == (key, sample))


def test_a_text_gets_a_token_at_each_step_while_a_long_prompt_is_read(lm: LanguageModel) -> None:
    writer = lm.writer(num_rows=4)
    settings = {"temperature": 0.0, "max_tokens": 60, "allowed": tuple(lm.encode(TEXT))}  # no halves of characters
    writer.add(0, lm.prompt("a"), SamplingParams(**settings))
    pieces = writer.step()
    long = TEXT * 5
    writer.add(1, lm.prompt(long), SamplingParams(**GREEDY))
    steps = [writer.step() for _ in range(12)]
    assert all(any(piece.prompt == 0 and piece.tokens for piece in step) for step in steps)
    assert not any(piece.prompt == 1 for piece in steps[0]), "it is read in several steps"
    pieces = [*pieces, *(piece for step in steps for piece in step), *drained(writer)]
    assert text_of(pieces, 0) == lm.generate("a", **settings).text
    assert text_of(pieces, 1) == lm.generate(long, **GREEDY).text


def test_prompts_take_turns_so_that_a_short_one_is_not_behind_a_long_one(lm: LanguageModel) -> None:
    writer = lm.writer(num_rows=4)
    writer.add(0, lm.prompt(TEXT * 20), SamplingParams(**GREEDY))
    writer.add(1, lm.prompt("the cat"), SamplingParams(**GREEDY))
    begun = [piece.prompt for _ in range(4) for piece in writer.step()]
    assert begun[:1] == [1]


def test_more_samples_than_rows_are_written_one_after_the_other(lm: LanguageModel) -> None:
    writer = lm.writer(num_rows=2)
    writer.add(7, lm.prompt(TEXT), SamplingParams(max_tokens=10, num_samples=5, seed=3))
    assert not writer.has_room
    most, pieces = 0, []
    while writer.num_texts:
        pieces += writer.step()
        most = max(most, writer.num_rows)
    assert most == 2
    expected = lm.generate_batch([TEXT], max_tokens=10, num_samples=5, seed=3)[0]
    assert [text_of(pieces, 7, sample) for sample in range(5)] == [made.text for made in expected]


def test_a_prompt_is_scored_while_it_is_read(lm: LanguageModel) -> None:
    writer = lm.writer(num_rows=1)
    writer.add(0, lm.prompt(TEXT), SamplingParams(max_tokens=0, log_probs=3), scores_prompt=True)
    (piece,) = drained(writer)
    assert [scored.id for scored in piece.scored] == lm.encode(TEXT)
    assert [scored.log_p for scored in piece.scored] == pytest.approx(lm.score(TEXT).tolist(), abs=1e-5)
    assert all(len(scored.top) == 3 and scored.top[0][1] >= scored.log_p - 1e-6 for scored in piece.scored)


def test_tokens_are_told_with_their_text_whatever_is_held_back(lm: LanguageModel) -> None:
    settings = {"max_tokens": 60, "temperature": 1.0, "top_k": 0, "seed": 5}
    whole = lm.generate(TEXT, **settings)
    for stop in ((), (whole.text[20:23],), ("zzzz" + whole.text[:1], whole.text[30:31])):
        writer = lm.writer(num_rows=1)
        writer.add(0, lm.prompt(TEXT), SamplingParams(**settings, stop=stop))
        pieces, made = drained(writer), lm.generate(TEXT, **settings, stop=stop)
        assert text_of(pieces, 0) == made.text
        told = [token for piece in pieces for token in piece.tokens]
        assert [token.id for token, _ in told] == made.ids
        shown = 0
        for piece in pieces:
            shown += len(piece.text)
            assert all(end <= shown for _, end in piece.tokens)
        assert [end for _, end in told] == sorted(end for _, end in told)


def test_texts_are_cut_as_if_they_had_all_their_tokens(lm: LanguageModel) -> None:
    writer = lm.writer(num_rows=1)
    writer.add(
        0, lm.prompt(TEXT[:4]), SamplingParams(temperature=0.0, max_tokens=100, num_samples=2), keeps_memory=True
    )
    pieces = [piece for _ in range(6) for piece in writer.step()]
    pieces += writer.cut(0)
    assert not writer.num_texts
    first, second = (piece.ending for piece in pieces[-2:])
    assert first is not None
    assert second is not None
    assert (first.finish, second.finish, len(second.tokens)) == ("length", "length", 0)
    made = lm.generate(TEXT[:4], temperature=0.0, max_tokens=len(first.tokens), keep_memory=True)
    assert text_of(pieces, 0) == made.text
    kept = lm.generation("", first, lm.prompt(TEXT[:4])).memory
    assert kept is not None
    assert made.memory is not None
    assert kept.last == made.memory.last
    assert torch.allclose(torch.stack(kept.past.key_values), torch.stack(made.memory.past.key_values), atol=1e-5)


def test_a_prompt_that_is_removed_leaves_nothing(lm: LanguageModel) -> None:
    writer = lm.writer(num_rows=2)
    for key, text in ((0, TEXT * 9), (1, "a"), (2, "b")):
        writer.add(key, lm.prompt(text), SamplingParams(max_tokens=100, num_samples=2))
    for _ in range(3):
        writer.step()
    for key in (0, 1, 2, 99):
        writer.remove(key)
    assert (writer.num_texts, writer.num_rows, writer.step()) == (0, 0, [])
