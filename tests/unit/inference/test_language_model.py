"""A model in a user's program: texts do not depend on other texts, memories continue, and hidden states are the
model's."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import txl_dist
from tests.helpers.language import distance_to_border
from tests.helpers.models import random_tokens, tiny_section
from txl_dist.config import renamed
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.inference.bundle import Package
from txl_dist.inference.generate import Decoder, Request
from txl_dist.inference.language_model import LanguageModel
from txl_dist.inference.options import Sampling, SamplingParams
from txl_dist.inference.probe import log_probabilities
from txl_dist.inference.text_memory import TextMemory
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.tokenizers.base import Tokenizer
from txl_dist.tokenizers.training import train_tokenizer

SEGMENT_LEN, MEMORY_LEN = 8, 12
BORDER = 1e-5
"""A draw so near to a border of the distribution, or a greedy choice between logits so near, may differ by rounding."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer("byte", lambda: ["the cat sat on the mat, the dog did not"])


def model_of(
    tokenizer: Tokenizer, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> LanguageModel:
    torch.manual_seed(seed)
    section = tiny_section(**changes)
    network = TransformerXL(section, vocab_size=tokenizer.vocab_size)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "bias" in name:
                parameter.normal_(0.0, 0.3)
    package = Package(
        section=section,
        weights=dict(network.named_parameters()),
        tokenizer=tokenizer,
        segment_len=SEGMENT_LEN,
        memory_len=MEMORY_LEN if section.takes_memory else 0,
        source={},
        probe={},
    )
    lm = LanguageModel(package.open(where="a test"))
    lm.network.to(dtype)
    return lm


@pytest.fixture(scope="module")
def lm(tokenizer: Tokenizer) -> LanguageModel:
    return model_of(tokenizer, dtype=torch.float64)


def texts(count: int) -> list[str]:
    return ["the cat sat on the mat, the dog did not"[: 1 + 5 * i % 39] + "abc" * i for i in range(count)]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        pytest.param({"top_k": 0, "temperature": 1.0}, marks=pytest.mark.slow),
        pytest.param({"top_k": 20}, marks=pytest.mark.slow),
        {"top_p": 0.8, "top_k": 0},
    ],
    ids=["greedy", "all", "top_k", "top_p"],
)
def test_a_batch_of_prompts_equals_single_runs_but_for_draws_at_a_border(
    tokenizer: Tokenizer, settings: dict[str, Any]
) -> None:
    """In fp32, where a batch rounds otherwise than a row. Such draws are counted: at most one in 10,000."""
    lm, num_draws, num_at_border = model_of(tokenizer), 0, 0
    for seed in range(2):
        together = lm.generate_batch(texts(16), max_tokens=60, seed=seed, **settings)
        alone = [lm.generate(text, max_tokens=60, seed=seed, **settings) for text in texts(16)]
        for (one,), other in zip(together, alone, strict=True):
            num_draws += len(other.ids)
            if one.ids != other.ids:
                first = next(i for i, (a, b) in enumerate(zip(one.ids, other.ids, strict=False)) if a != b)
                assert distance_to_border(lm, texts(16)[together.index([one])], one.ids[:first], seed) <= BORDER
                num_at_border += 1
    assert num_draws > 1500
    assert num_at_border <= num_draws / 10_000


def test_texts_of_every_length_and_setting_in_one_batch_are_those_of_single_runs(lm: LanguageModel) -> None:
    """In fp64, exactly; rows come and go, as there are more prompts than rows."""
    settings = {"max_tokens": 30, "top_k": 9, "repetition_penalty": 1.2, "min_p": 0.01, "num_samples": 3, "seed": 7}
    expected = [lm.generate_batch([text], **settings)[0] for text in texts(7)]
    assert len({made.text for made in expected[0]}) == 3, "samples differ"
    for batch_size in (1, 4, 16):
        together = lm.generate_batch(texts(7), batch_size=batch_size, **settings)
        assert [[made.ids for made in one] for one in together] == [[made.ids for made in one] for one in expected]


def test_a_text_goes_on_from_a_memory_as_from_the_text_itself(lm: LanguageModel) -> None:
    first, second = "the cat sat", " on the mat"
    for memory_len in (8, 100):
        settings = {"max_tokens": 25, "temperature": 0.0, "memory_len": memory_len}
        memory = lm.memory(first, memory_len=memory_len)
        # A past that is read in the same chunks: up to the last token of the first part.
        again = lm.memory(second, memory=memory, memory_len=memory_len)
        expected = lm.generate("", memory=again, **settings)
        assert lm.generate(second, memory=memory, **settings).text == expected.text
        if memory_len == 100:
            assert lm.generate(first + second, **settings).text == expected.text
    assert lm.generate(second, **settings).text != expected.text, "the memory counts"


def test_a_conversation_kept_turn_by_turn_is_one_long_text(lm: LanguageModel) -> None:
    settings = {"max_tokens": 10, "temperature": 0.0, "memory_len": 500, "keep_memory": True}
    ids, memory = list(lm.prompt("").ids), None
    for turn in ("the cat", " and", "", " dog"):
        made = lm.generate(turn, memory=memory, **settings)
        ids, memory = [*ids, *lm.encode(turn), *made.ids], made.memory
    assert memory is not None
    whole = lm.memory(ids, memory_len=500)
    assert memory.last == whole.last
    assert (torch.stack(memory.past.key_values) - torch.stack(whole.past.key_values)).abs().max() <= 1e-10


def test_a_text_that_was_stopped_is_remembered_as_far_as_it_was_shown(lm: LanguageModel) -> None:
    settings = {"max_tokens": 40, "temperature": 1.0, "top_k": 0, "memory_len": 500, "seed": 3}
    whole = lm.generate("the cat", **settings)
    stop = whole.text[11:13]
    made = lm.generate("the cat", **settings, stop=stop, keep_memory=True)
    assert made.finish == "stop"
    assert made.text == whole.text[: whole.text.index(stop)]
    assert made.memory is not None
    expected = lm.memory([*lm.prompt("the cat").ids, *made.ids], memory_len=500)
    assert made.memory.last == expected.last
    assert (torch.stack(made.memory.past.key_values) - torch.stack(expected.past.key_values)).abs().max() <= 1e-10


def test_a_text_that_the_model_ended_is_remembered_whole_with_a_full_memory_too(lm: LanguageModel) -> None:
    settings = {"temperature": 1.0, "top_k": 0, "keep_memory": True}
    made = [lm.generate("the cat sat on the mat", max_tokens=300, seed=seed, **settings) for seed in range(8)]
    ended = [(seed, one) for seed, one in enumerate(made) if one.finish == "end_of_text"]
    assert ended
    for seed, one in ended:
        same = lm.generate("the cat sat on the mat", max_tokens=len(one.ids), seed=seed, **settings)
        assert same.finish == "length"
        assert one.memory is not None
        assert same.memory is not None
        assert one.memory.last == same.memory.last
        assert torch.equal(torch.stack(one.memory.past.key_values), torch.stack(same.memory.past.key_values))


@pytest.mark.parametrize("start", [0, 1, 2, 17, 33])
def test_a_stop_string_of_several_tokens_takes_nothing_else_from_a_full_memory(lm: LanguageModel, start: int) -> None:
    settings = {"memory_len": 6, "seed": 2, "allowed": lm.encode("abc"), "top_k": 0, "temperature": 2.0}
    whole = lm.generate("the cat sat", max_tokens=60, **settings)
    stop = whole.text[start : start + 14]
    made = lm.generate("the cat sat", max_tokens=60, stop=["never there, and long", stop], keep_memory=True, **settings)
    assert (made.finish, made.text) == ("stop", whole.text[: whole.text.index(stop)])
    same = lm.generate("the cat sat", max_tokens=len(made.ids), keep_memory=True, **settings)
    assert made.memory is not None
    assert same.memory is not None
    assert (made.memory.last, len(made.memory)) == (same.memory.last, 7)
    # At the beginning the past was read in a chunk, and not in another.
    assert (torch.stack(made.memory.past.key_values) - torch.stack(same.memory.past.key_values)).abs().max() <= 1e-12


def test_room_is_made_for_what_the_texts_can_come_to_and_not_for_all_that_may_be_seen(lm: LanguageModel) -> None:
    lengths = {"memory_len": 10**9, "segment_len": 8}
    decoder, expected = Decoder(lm.frozen, **lengths), {}
    for key, (length, max_tokens) in {"a": (3, 6), "b": (30, 20), "c": (1, 2), "d": (7, 70)}.items():
        request = Request(ids=(1, 2, 5) * 10, max_tokens=max_tokens, seed=3)._replace(ids=((1, 2, 5) * 10)[:length])
        alone = Decoder(lm.frozen, memory_len=100, segment_len=8)
        alone.add(key, request)
        expected[key] = [alone.step()[0].id for _ in range(max_tokens)]
        decoder.add(key, request)
        for token in decoder.step():
            assert token.id == expected[str(token.key)].pop(0)
            if token.is_last:
                decoder.remove(token.key)
        assert decoder._rows._ring.size <= 2 * (length + max_tokens) + 60  # type: ignore[union-attr]
    while decoder.keys:
        for token in decoder.step():
            assert token.id == expected[str(token.key)].pop(0)
            if token.is_last:
                decoder.remove(token.key)
    assert not any(expected.values())
    assert len(lm.score("the cat", memory_len=10**12)) == len(lm.encode("the cat"))


@pytest.mark.parametrize("seed", range(5))
def test_a_stop_string_is_never_shown_in_part_whatever_the_pieces(lm: LanguageModel, seed: int) -> None:
    whole = lm.generate("a", max_tokens=40, seed=seed, top_k=4)
    for start, length in itertools.product((3, 10, 20), (1, 2, 5)):
        stop = whole.text[start : start + length]
        pieces = list(lm.stream("a", max_tokens=40, seed=seed, top_k=4, stop=["never there", stop]))
        assert "".join(pieces) == whole.text[: whole.text.index(stop)]


def test_a_memory_in_a_file_is_the_memory(lm: LanguageModel, tmp_path: Path) -> None:
    memory = lm.memory("the cat sat on the mat, the dog did not")
    memory.save(tmp_path / "memory")
    again = lm.load_memory(tmp_path / "memory")
    assert torch.equal(torch.stack(again.past.key_values), torch.stack(memory.past.key_values))
    assert torch.equal(again.past.document_S, memory.past.document_S)
    assert (again.last, again.model, len(again)) == (memory.last, memory.model, len(memory))
    assert lm.generate("x", memory=again, seed=1) == lm.generate("x", memory=memory, seed=1)


def test_a_name_that_is_no_section_is_said_to_be_none(lm: LanguageModel) -> None:
    for given in ({"path": "a.toml"}, {"modle": {}}, {"modle": 5}):
        with pytest.raises(ConfigError, match="unknown setting"):
            txl_dist.configure(**given)  # type: ignore[arg-type]


def test_a_memory_does_not_take_the_place_of_a_pipe(lm: LanguageModel, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ConfigError, match="is not a file, so a memory cannot be written to it"):
            lm.memory("a").save(path)
    assert (tmp_path / "pipe").is_fifo()


def test_a_memory_of_another_model_or_a_damaged_one_is_refused(
    lm: LanguageModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    memory, other = lm.memory("the cat"), model_of(tokenizer, seed=1, dtype=torch.float64)
    for call in (other.generate, other.score, other.memory):
        with pytest.raises(ConfigError, match="belongs to another model"):
            call("x", memory=memory)
    memory.save(tmp_path / "memory")
    with pytest.raises(CheckpointError, match="belongs to another model"):
        other.load_memory(tmp_path / "memory")
    content = (tmp_path / "memory").read_bytes()
    flipped = bytearray(content)
    flipped[-20] ^= 1
    damages = {"cut": content[:-9], "flipped": bytes(flipped), "text": b"no tensors", "empty": b""}
    for name, damage in damages.items():
        (tmp_path / name).write_bytes(damage)
        with pytest.raises(CheckpointError, match=f"{name} (cannot be read|is damaged)"):
            lm.load_memory(tmp_path / name)
    with pytest.raises(CheckpointError, match="cannot be read"):
        lm.load_memory(tmp_path / "missing")


def test_a_memory_is_a_value_that_no_text_changes(lm: LanguageModel) -> None:
    memory = lm.memory("the cat sat on the mat")
    copy = torch.stack(memory.past.key_values).clone()
    lm.generate_batch(["a", "bc"], memory=memory, max_tokens=20, num_samples=2, keep_memory=True)
    lm.score("a text that is longer than the memory", memory=memory)
    assert torch.equal(torch.stack(memory.past.key_values), copy)


def test_many_texts_are_scored_together_as_one_by_one(lm: LanguageModel) -> None:
    memory = lm.memory("the dog")
    for given in (None, memory):
        together = lm.score_batch(texts(20), memory=given)
        for text, scores in zip(texts(20), together, strict=True):
            alone = lm.score(text, memory=given)
            assert scores.shape == alone.shape
            assert (scores - alone).abs().max() <= 1e-10
    assert lm.score_batch([]) == []


def test_scores_without_a_memory_do_not_depend_on_longer_texts_beside(tokenizer: Tokenizer) -> None:
    absolute, batch = model_of(tokenizer, positions="absolute"), ["a", *texts(4), ""]
    for together, text in zip(absolute.score_batch(batch), batch, strict=True):
        assert torch.allclose(together, absolute.score(text), atol=1e-5)


def test_scores_behind_a_memory_are_those_of_the_whole_text(lm: LanguageModel) -> None:
    first, second = "the cat sat", " on the mat"
    whole = lm.score(first + second, memory_len=100)
    behind = lm.score(second, memory=lm.memory(first, memory_len=100), memory_len=100)
    assert (whole[-len(behind) :] - behind).abs().max() <= 1e-10
    assert len(behind) == len(lm.encode(second))


def test_log_probabilities_are_the_models_whatever_is_drawn(lm: LanguageModel) -> None:
    made = lm.generate("the", max_tokens=12, temperature=0.3, top_k=3, log_probs=4, memory_len=100, seed=2)
    scores = lm.score([*lm.prompt("the").ids, *made.ids], memory_len=100)[-12:]
    assert np.allclose(made.log_probs, scores.tolist(), atol=1e-10)
    for i, log_p, top in zip(made.ids, made.log_probs, made.top, strict=True):
        assert len(top) == 4
        assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
        assert (i, log_p) in [(j, pytest.approx(value, abs=1e-12)) for j, value in top[:3]]


def test_only_allowed_ids_are_drawn(lm: LanguageModel) -> None:
    allowed = lm.encode("abc ")
    made = lm.generate("the", max_tokens=50, allowed=allowed, top_k=0, temperature=3.0)
    assert set(made.ids) == set(allowed)


def test_ids_are_taken_as_they_are_and_empty_prompts_begin_a_document(lm: LanguageModel) -> None:
    ids = lm.encode("the cat")
    end_of_text = lm.tokenizer.end_of_text
    assert end_of_text is not None
    assert lm.prompt(ids).ids == tuple(ids)
    assert lm.prompt("the cat").ids == (end_of_text, *ids)
    assert lm.prompt("").ids == lm.prompt([]).ids == (end_of_text,)
    assert lm.generate([end_of_text, *ids], seed=1) == lm.generate("the cat", seed=1)


@pytest.mark.parametrize("ids", [[999], [-1], [3, 10**6]])
def test_ids_outside_the_vocabulary_are_refused_by_everything(lm: LanguageModel, ids: list[int]) -> None:
    for call in (lm.score, lm.generate, lm.memory, lm.decode):
        with pytest.raises(ConfigError, match="is not an id of this model's vocabulary"):
            call(ids)
    with pytest.raises(ConfigError, match="vocabulary"):
        lm.hidden(torch.tensor([ids]))


def test_hidden_states_are_those_of_the_model_for_tokens_and_for_vectors(lm: LanguageModel) -> None:
    network, tokens = lm.network, random_tokens(2, 20)
    memory, ours = network.empty_memory(num_lanes=2, memory_len=MEMORY_LEN), lm.empty_memory(num_rows=2, chunk_len=7)
    vectors_memory = lm.empty_memory(num_rows=2, chunk_len=7)
    for piece in tokens.split([7, 1, 5, 7], dim=1):
        with torch.no_grad():
            expected, memory = network(piece, memory)
        hidden, ours = lm.hidden(piece, ours)
        by_vector, vectors_memory = lm.hidden(network.embedding(piece).detach(), vectors_memory)
        assert hidden.shape == (4, 2, piece.shape[1], 12)
        assert (hidden[-1] - expected).abs().max() <= 1e-10
        num_kept = min(MEMORY_LEN, piece.shape[1])
        assert (hidden[:-1, :, -num_kept:] - torch.stack(memory.hidden)[:, :, -num_kept:]).abs().max() <= 1e-10
        assert torch.equal(hidden, by_vector)
    head = torch.nn.Linear(12, 1, dtype=torch.float64)
    head(hidden).sum().backward()
    assert head.weight.grad is not None


def test_a_row_that_begins_a_document_sees_nothing_of_what_it_was(lm: LanguageModel) -> None:
    memory = lm.empty_memory(num_rows=2, chunk_len=5, with_documents=True)
    document = torch.zeros(2, 5, dtype=torch.int64)
    lm.hidden(random_tokens(2, 5), memory, document_BT=document)
    document[1] = 1
    hidden, _ = lm.hidden(random_tokens(2, 5, seed=1), memory, document_BT=document)
    alone, _ = lm.hidden(random_tokens(2, 5, seed=1))
    assert (hidden[:, 1] - alone[:, 1]).abs().max() <= 1e-12
    assert (hidden[-1, 0] - alone[-1, 0]).abs().max() > 1e-3


WRONG_SETTINGS = [
    *({"temperature": "hot"}, {"temperature": True}, {"temperature": 10**400}, {"top_k": 2.5}, {"max_tokens": "9"}),
    *({"stop": None}, {"stop": 5}, {"stop": b"ab"}, {"stop": ["a", 5]}, {"allowed": "abc"}, {"allowed": [True]}),
    *({"seed": 1.5}, {"memory_len": math.inf}),
]


@pytest.mark.parametrize("settings", WRONG_SETTINGS, ids=map(str, range(len(WRONG_SETTINGS))))
def test_settings_of_another_kind_are_refused_by_name(lm: LanguageModel, settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=rf"{name}=.*: it must be (a number|a whole number|a string, or|a list of)"):
        lm.generate("a", **settings)


def test_settings_may_be_arrays_and_tensors(lm: LanguageModel) -> None:
    ids = lm.encode("abc")
    expected = lm.generate(ids, allowed=ids, seed=3, max_tokens=5)
    for given in (np.array(ids), torch.tensor(ids), tuple(ids), set(ids)):
        assert lm.generate(ids, allowed=given, seed=np.int64(3), max_tokens=np.int32(5)) == expected
    assert lm.generate(torch.tensor(ids), allowed=ids, seed=3, max_tokens=5) == expected


@pytest.mark.parametrize("given", [None, 5, b"ab", [1.5], ["a"], {"prompt": "a"}, {5}, [True], torch.tensor([[1, 2]])])
def test_what_is_neither_text_nor_ids_is_refused_by_everything(lm: LanguageModel, given: Any) -> None:
    for call in (lm.generate, lm.stream, lm.score, lm.memory, lm.prompt, lm.decode):
        with pytest.raises(ConfigError, match=r"is not a (list of token ids|token id) .*Correct the (list|id)"):
            call(given)
    for several in (lm.generate_batch, lm.score_batch):
        with pytest.raises(ConfigError, match=r"is not a (list of token ids|token id) .*Correct the (list|id)"):
            several([given])
    if not isinstance(given, list | dict | set | torch.Tensor):
        with pytest.raises(ConfigError, match="is not a text"):
            lm.encode(given)


def test_one_text_is_not_taken_for_several_nor_a_number_for_a_memory(lm: LanguageModel, tmp_path: Path) -> None:
    ring = lm.empty_memory(num_rows=1)
    wrong: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        *((lm.generate_batch, (given,), {}) for given in ("abc", 5, {"a": 1}, {"a"})),
        *((lm.score_batch, (given,), {}) for given in ("abc", None)),
        *((call, ("a",), {"memory": given}) for call in (lm.generate, lm.score, lm.memory) for given in (5, ring)),
        *((call, ("a",), {"memory_len": given}) for call in (lm.score, lm.memory) for given in ("x", 2.5, -2, True)),
        *((lm.stream, ("a",), {"num_samples": given}) for given in (2, "x")),
        *((lm.empty_memory, (), {"num_rows": given}) for given in (0, "x", 10**30)),
        *((lm.empty_memory, (), {"num_rows": 1, "chunk_len": given}) for given in (0, 1.5)),
        (lm.empty_memory, (), {"num_rows": 1, "memory_len": "x"}),
        *((call, (5,), {}) for call in (lm.load_memory, lm.memory("a").save, txl_dist.load, txl_dist.open_corpus)),
        *((txl_dist.configure, (given,), {}) for given in (5, {"model": {}})),
        *((txl_dist.configure, (), {"model": given}) for given in (5, None, {(1, 2): 3})),
        (txl_dist.TransformerXL, (txl_dist.Config(),), {"vocab_size": 5}),
        (txl_dist.TransformerXL, (txl_dist.Config().model,), {"vocab_size": "x"}),
        *((txl_dist.load, (tmp_path,), {"device": given}) for given in ("banana", "meta", None, "cuda:77")),
        (txl_dist.load, (tmp_path / "nowhere",), {}),
    ]
    for call, arguments, named in wrong:
        with pytest.raises(ConfigError):
            call(*arguments, **named)


def test_impossible_inputs_are_refused_with_a_remedy(lm: LanguageModel, tokenizer: Tokenizer) -> None:
    memory = lm.empty_memory(num_rows=2, chunk_len=5)
    for inputs in (torch.zeros(2, 6, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.int64)):
        with pytest.raises(ConfigError, match="Pass inputs of this size"):
            lm.hidden(inputs, memory)
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    for wrong in (
        *(torch.zeros(2, 5), torch.zeros(2, 5, 11, dtype=torch.float64), torch.zeros(5, dtype=torch.int64)),
        *(torch.zeros(2, 5, 12), tokens[:, :0], tokens[:0], tokens.int(), torch.zeros(2, 0, 12, dtype=torch.float64)),
        tokens.tolist(),
    ):
        with pytest.raises(ConfigError, match="int64 tokens"):
            lm.hidden(wrong)  # type: ignore[arg-type]
    for wrong_document in (tokens[:, :3], torch.zeros(2, 5), tokens - 1, 5):
        with pytest.raises(ConfigError, match="document_BT must be an int64 tensor"):
            lm.hidden(tokens, document_BT=wrong_document)  # type: ignore[arg-type]
    for other in (lm.memory("a"), model_of(tokenizer).empty_memory(num_rows=2, chunk_len=5)):
        with pytest.raises(ConfigError, match="was not made by empty_memory"):
            lm.hidden(tokens, other)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="with_documents"):
        lm.hidden(torch.zeros(2, 5, dtype=torch.int64), memory, document_BT=torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(ConfigError, match="zero_memory"):
        lm.score("a", memory=lm.memory("b"), zero_memory=True)
    with pytest.raises(ConfigError, match="generate_batch"):
        lm.generate("a", num_samples=2)
    with pytest.raises(ConfigError, match=r"Did you mean max_tokens\?"):
        lm.generate("a", max_token=2)
    absolute = model_of(tokenizer, positions="absolute")
    with pytest.raises(ConfigError, match="has no memory"):
        absolute.memory("a")
    with pytest.raises(ConfigError, match="has no memory"):
        absolute.generate("a", keep_memory=True)
    assert len(absolute.generate_batch(["a", "bcd"], max_tokens=5)[1][0].ids) == 5
    assert absolute.score("the cat").shape == (len(absolute.encode("the cat")),)


def test_no_tokens_are_an_empty_text_with_the_memory_of_the_prompt(lm: LanguageModel) -> None:
    made = lm.generate("the cat", max_tokens=0, keep_memory=True)
    assert (made.text, made.ids, made.finish) == ("", [], "length")
    assert isinstance(made.memory, TextMemory)
    assert torch.equal(torch.stack(made.memory.past.key_values), torch.stack(lm.memory("the cat").past.key_values))


def test_prompts_are_read_one_by_one_as_rows_become_free(lm: LanguageModel) -> None:
    read: list[int] = []

    def prompts() -> Any:
        for number in range(6):
            read.append(number)
            yield lm.prompt("abc")

    pieces = lm.stream_batch(prompts(), SamplingParams(max_tokens=5, batch_size=2))
    next(pieces)
    assert len(read) <= 2
    assert sum(piece.ending is not None for piece in pieces) == 6


def test_write_is_stream_batch_with_one_warning(lm: LanguageModel, capsys: pytest.CaptureFixture[str]) -> None:
    renamed._warn.cache_clear()
    params = SamplingParams(max_tokens=5, temperature=0)
    expected = [chunk.text for chunk in lm.stream_batch([lm.prompt("abc")], params)]
    for _ in range(2):
        assert [chunk.text for chunk in lm.write([lm.prompt("abc")], params)] == expected
    assert capsys.readouterr().err.splitlines() == [
        "txl: warning: LanguageModel.write is named LanguageModel.stream_batch since version 0.3.0."
    ]


def test_the_package_imports_no_torch_and_names_what_it_has() -> None:
    code = (
        "import sys, txl_dist; assert 'torch' not in sys.modules; assert 'load' in dir(txl_dist)\n"
        "try: txl_dist.laod\nexcept AttributeError as error: assert 'load' in str(error)\n"
        "assert txl_dist.configure(model={'width': 64}).model.width == 64; assert 'torch' not in sys.modules\n"
        "assert all(hasattr(txl_dist, name) for name in txl_dist.__all__)\n"
        "assert all(getattr(txl_dist, name).__doc__ for name in txl_dist.__all__ if name != '__version__')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with pytest.raises(ConfigError, match=r"Did you mean model.width\?"):
        txl_dist.configure(model={"widht": 64})


def test_scores_are_tensors_that_others_may_compute_and_train_with(lm: LanguageModel) -> None:
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    scores = lm.score("the cat").neg_()
    (scores * weight).sum().backward()
    assert weight.grad is not None


def test_of_several_documents_a_model_with_masks_goes_on_with_the_last(tokenizer: Tokenizer) -> None:
    end_of_text = tokenizer.end_of_text
    lm = model_of(tokenizer, dtype=torch.float64)
    masked = LanguageModel(dataclasses.replace(lm.bundle, document_mask=True))
    first, last = lm.encode("the cat"), lm.encode("the dog")
    ids = [end_of_text, *first, end_of_text, *last]
    assert masked.generate(ids, seed=1).ids == masked.generate([end_of_text, *last], seed=1).ids
    assert masked.prompt([end_of_text, *last], masked.memory("the mat")).past is None
    assert lm.prompt(ids).ids == tuple(ids), "a memory that is carried over borders reads all of them"


def test_of_several_documents_a_model_with_masks_scores_each_as_if_it_were_alone(tokenizer: Tokenizer) -> None:
    end_of_text, plain = tokenizer.end_of_text, model_of(tokenizer, dtype=torch.float64)
    lm = LanguageModel(dataclasses.replace(plain.bundle, document_mask=True))
    documents = [[end_of_text, *lm.encode(text)] for text in ("the cat", "sat", "on the mat, the dog")]
    together = [*itertools.chain(*documents), end_of_text]
    found = lm.score(together, memory_len=50)
    alone = torch.cat([lm.score([*ids, end_of_text], memory_len=50) for ids in documents])
    assert (found - alone).abs().max() <= 1e-10
    behind = lm.score([*lm.encode(" did"), *together], memory=lm.memory("the dog", memory_len=50), memory_len=50)
    assert (behind[-len(found) :] - found).abs().max() <= 1e-10
    assert (lm.score_batch(["a", together, "the cat"], memory_len=50)[1] - found).abs().max() <= 1e-10
    assert (plain.score(together, memory_len=50) - found).abs().max() > 1e-3
    with pytest.raises(ConfigError, match="belongs to no document"):
        lm.score("a", zero_memory=True)


def test_without_a_memory_too_a_document_is_scored_without_those_before_it(tokenizer: Tokenizer) -> None:
    plain = model_of(tokenizer, dtype=torch.float64, positions="absolute")
    lm = LanguageModel(dataclasses.replace(plain.bundle, document_mask=True))
    before, after = lm.encode("ab"), [tokenizer.end_of_text, *lm.encode("the")]
    one, other = (lm.score([tokenizer.end_of_text, *ids, *after])[3:] for ids in (before, lm.encode("xy")))
    assert (one - other).abs().max() <= 1e-10
    assert len(one) == 3


def test_texts_that_pay_for_what_they_hold_may_stand_beside_others(lm: LanguageModel) -> None:
    def texts_of(decoder: Decoder, penalties: dict[str, float]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {key: [] for key in penalties}
        for key, penalty in penalties.items():
            sampling = Sampling(temperature=1.0, top_k=0, repetition_penalty=penalty)
            ids = tuple(lm.encode(key * 3))
            decoder.add(key, Request(ids=ids, max_tokens=4 + len(found), sampling=sampling, seed=5))
            for token in decoder.step():
                found[str(token.key)].append(token.id)
                if token.is_last:
                    decoder.remove(token.key)
        while decoder.keys:
            for token in decoder.step():
                found[str(token.key)].append(token.id)
                if token.is_last:
                    decoder.remove(token.key)
        return found

    penalties = {"a": 1.0, "b": 3.0, "c": 1.5, "d": 1.0, "e": 3.0, "f": 3.0}
    decoder = Decoder(lm.frozen, memory_len=50, segment_len=8)
    for found in (texts_of(decoder, penalties), texts_of(decoder, penalties)):
        for key, penalty in penalties.items():
            alone = Decoder(lm.frozen, memory_len=50, segment_len=8)
            sampling = Sampling(temperature=1.0, top_k=0, repetition_penalty=penalty)
            alone.add(0, Request(ids=tuple(lm.encode(key * 3)), max_tokens=99, sampling=sampling, seed=5))
            assert found[key] == [alone.step()[0].id for _ in found[key]], key


def test_numbers_that_are_none_are_said_to_be(tokenizer: Tokenizer) -> None:
    lm = model_of(tokenizer)
    with torch.no_grad():
        lm.network.softmax.get_parameter("bias_0").fill_(torch.nan)
    for settings in ({}, {"temperature": 0.0}, {"top_k": 0}):
        with pytest.raises(CheckpointError, match="not numbers"):
            lm.generate("the", **settings)


def test_weights_that_change_are_read_again_and_old_memories_refused(tokenizer: Tokenizer) -> None:
    lm, other = model_of(tokenizer, dtype=torch.float64), model_of(tokenizer, seed=1, dtype=torch.float64)
    before, memory, ring = lm.score("the cat"), lm.memory("the"), lm.empty_memory(num_rows=1)
    assert lm.frozen is lm.frozen
    with torch.no_grad():
        lm.network.load_state_dict(other.network.state_dict())
    assert torch.equal(lm.score("the cat"), other.score("the cat"))
    assert not torch.equal(lm.score("the cat"), before)
    assert lm.fingerprint == other.fingerprint
    with pytest.raises(ConfigError, match="belongs to another model"):
        lm.generate("a", memory=memory)
    with pytest.raises(ConfigError, match="or to earlier weights of this model"):
        lm.hidden(torch.zeros(1, 1, dtype=torch.int64), ring)
    lm.network.to(torch.float32)
    assert lm.score("the cat").dtype == torch.float32


def test_a_text_that_is_gone_costs_the_others_nothing(lm: LanguageModel) -> None:
    decoder = Decoder(lm.frozen, memory_len=100, segment_len=8)
    for key, length in (("long", 90), ("a", 3), ("b", 3)):
        decoder.add(key, Request(ids=(1,) * length, max_tokens=50))
    decoder.step()
    decoder.remove("long")
    decoder.step()
    ring = decoder._rows._ring  # type: ignore[union-attr]
    assert ring.past_len <= 5


def test_absolute_positions_that_were_allowed_a_memory_are_scored_over_it_and_write_without(
    tokenizer: Tokenizer,
) -> None:
    """In generation each token would be a segment of its own, at one position."""
    text, vanilla = "the cat sat on the mat, the dog did not", model_of(tokenizer, positions="absolute")
    lm = model_of(tokenizer, positions="absolute", absolute_with_memory=True)
    ids = torch.tensor([lm.prompt(text).ids])
    expected = log_probabilities(lm.network, ids, segment_len=SEGMENT_LEN, memory_len=MEMORY_LEN)[0]
    assert torch.equal(lm.score(text), expected)
    assert not torch.allclose(vanilla.score(text), expected)
    settings: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0}
    assert lm.generate(text, **settings).text == vanilla.generate(text, **settings).text
    with pytest.raises(ConfigError, match="absolute positions has no memory"):
        lm.generate(text, keep_memory=True, **settings)
