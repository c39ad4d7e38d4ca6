"""Scores with adapting weights equal naive loops over the published equations, and never depend on later tokens."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.helpers.models import RECURRENT, VARIANTS, VOCAB_SIZE, tiny_section
from txl_dist.inference import dynamic_evaluation
from txl_dist.inference.dynamic_evaluation import (
    DynamicRule,
    NeuralCache,
    Weights,
    cache_losses,
    dynamic_losses,
    empty_cache,
    square_sums,
    weights_of,
)
from txl_dist.model.memory import EMPTY
from txl_dist.model.transformer_xl import Batch, SegmentLoss, TransformerXL

SEGMENT_LEN, MEMORY_LEN, WIDTH = 6, 9, 7
SETTINGS = {"lr": 0.02, "decay": 0.03, "eps": 0.1}
CASES: dict[str, dict[str, Any]] = {
    **RECURRENT,
    "adaptive": VARIANTS["adaptive_div_2"],
    "pre_norm": VARIANTS["pre_norm"],
}


def model_of(**settings: Any) -> TransformerXL:
    torch.manual_seed(3)
    return TransformerXL(tiny_section(**settings), vocab_size=VOCAB_SIZE).double().eval()


def batches_of(tokens_BS: Tensor, *, scored_BS: Tensor | None = None) -> Iterator[Batch]:
    for start in range(0, tokens_BS.shape[1] - 1, SEGMENT_LEN):
        stop = min(start + SEGMENT_LEN, tokens_BS.shape[1] - 1)
        scored_BT = torch.ones(tokens_BS.shape[0], stop - start)
        if scored_BS is not None:
            scored_BT = scored_BS[:, start + 1 : stop + 1].float()
        yield Batch(tokens_BS[:, start:stop], tokens_BS[:, start + 1 : stop + 1], scored_BT, None)


def tokens_of(*shape: int, seed: int = 0, high: int = VOCAB_SIZE) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def adapted(model: TransformerXL, tokens_BS: Tensor, root: Weights, **rule: float) -> Tensor:
    """nll of all tokens but the first, [B, S - 1]."""
    module = SegmentLoss(model)
    weights = start = weights_of(module)
    memory = model.empty_memory(num_lanes=tokens_BS.shape[0], memory_len=MEMORY_LEN)
    follows, parts = DynamicRule(start, root, **{**SETTINGS, **rule}), []
    for batch in batches_of(tokens_BS):
        nll_BT, weights, memory = dynamic_losses(module, batch, weights, memory, rule=follows)
        parts.append(nll_BT)
    return torch.cat(parts, dim=1)


def roots_of(model: TransformerXL, **given: Any) -> Weights:
    tokens = tokens_of(2, 25, seed=9)
    sums = square_sums(model, batches_of(tokens, **given), model.empty_memory(num_lanes=2, memory_len=MEMORY_LEN))
    return {name: total.sqrt() for name, total in sums.items()}


@pytest.mark.parametrize("case", CASES)
def test_dynamic_scores_are_those_of_a_model_that_is_stepped_in_place(case: str) -> None:
    """Each weight by itself, with `backward`, the update as it is published."""
    model, tokens = model_of(**CASES[case]), tokens_of(2, 28)
    stepped = copy.deepcopy(model)
    start = {name: weight.detach().clone() for name, weight in stepped.named_parameters()}
    sums = {name: torch.zeros_like(weight) for name, weight in start.items()}
    memory = stepped.empty_memory(num_lanes=2, memory_len=MEMORY_LEN)
    for batch in batches_of(tokens_of(2, 25, seed=9)):
        memory = naive_backward(stepped, batch, memory)[1]
        for name, weight in stepped.named_parameters():
            sums[name] += 0 if weight.grad is None else weight.grad**2
    expected = []
    memory = stepped.empty_memory(num_lanes=2, memory_len=MEMORY_LEN)
    for batch in batches_of(tokens):
        nll_BT, memory = naive_backward(stepped, batch, memory)
        expected.append(nll_BT)
        with torch.no_grad():
            for name, weight in stepped.named_parameters():
                root, moved = sums[name].sqrt(), weight - start[name]
                gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
                weight -= SETTINGS["lr"] * gradient / (root + SETTINGS["eps"]) + SETTINGS["decay"] * root * moved
    found = adapted(model, tokens, roots_of(model))
    torch.testing.assert_close(found, torch.cat(expected, dim=1), atol=1e-11, rtol=0)
    static = adapted(model, tokens, roots_of(model), lr=0.0)
    assert torch.equal(found[:, :SEGMENT_LEN], static[:, :SEGMENT_LEN]), "the first segment is scored before a step"
    assert (found - static)[:, SEGMENT_LEN:].abs().max() > 1e-3, "it makes a difference"


def naive_backward(model: TransformerXL, batch: Batch, memory: Any) -> tuple[Tensor, Any]:
    model.zero_grad()
    hidden_BTD, memory = model(batch.tokens_BT, memory)
    nll_BT = model.softmax(hidden_BTD, batch.targets_BT)
    nll_BT.mean().backward()
    return nll_BT.detach(), memory


@pytest.mark.parametrize("case", CASES)
def test_the_last_token_changes_no_score_before_it_bit_for_bit(case: str) -> None:
    """Also where it opens a segment, and in a lane beside another one. It stays in its cluster of the vocabulary."""
    model = model_of(**CASES[case])
    root = roots_of(model)
    for length in (25, 26, 28):
        tokens = tokens_of(2, length)
        changed = tokens.clone()
        tokens[1, -1], changed[1, -1] = 30, 40
        first, second = adapted(model, tokens, root), adapted(model, changed, root)
        assert torch.equal(first[:, :-1], second[:, :-1])
        assert torch.equal(first[0], second[0])
        assert first[1, -1] != second[1, -1]


def test_a_token_changes_the_scores_behind_its_segment_by_way_of_the_weights_alone() -> None:
    """In another lane, whose memory does not know it."""
    model, tokens = model_of(), tokens_of(2, 20)
    changed = tokens.clone()
    changed[0, 3] = (tokens[0, 3] + 1) % VOCAB_SIZE
    root = roots_of(model)
    first, second = adapted(model, tokens, root), adapted(model, changed, root)
    assert torch.equal(first[1, :SEGMENT_LEN], second[1, :SEGMENT_LEN])
    assert bool((first[1, SEGMENT_LEN:] != second[1, SEGMENT_LEN:]).any())


def test_the_weights_of_the_model_are_never_written() -> None:
    model, tokens = model_of(**CASES["adaptive"]), tokens_of(2, 28)
    before = copy.deepcopy(model.state_dict())
    first = adapted(model, tokens, roots_of(model), lr=0.5)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(adapted(model, tokens, roots_of(model), lr=0.5), first), "nothing of the first time is left"


def test_what_is_not_scored_moves_no_weight() -> None:
    """Padding, and tokens that are run again; a segment of it alone gives a gradient of zero, not of 0 / 0."""
    model, tokens = model_of(), tokens_of(2, 25, seed=9)
    scored = torch.ones_like(tokens)
    scored[1, 5:] = 0
    other = tokens.clone()
    other[1, 5:] = (other[1, 5:] + 1) % VOCAB_SIZE
    sums = [
        square_sums(model, batches_of(one, scored_BS=scored), model.empty_memory(num_lanes=2, memory_len=MEMORY_LEN))
        for one in (tokens, other)
    ]
    for name, total in sums[0].items():
        torch.testing.assert_close(total, sums[1][name], atol=1e-12, rtol=1e-9)
    none = roots_of(model, scored_BS=torch.zeros_like(tokens))
    assert all(not root.any() for root in none.values())


def test_weights_without_gradients_return_to_where_they_began() -> None:
    rule = DynamicRule({"w": torch.tensor([1.0])}, {"w": torch.tensor([0.5])}, lr=0.1, decay=0.4, eps=0.0)
    theta, distances = {"w": torch.tensor([2.0])}, [1.0]
    for _ in range(3):
        theta = dict(rule.step(theta, {"w": torch.zeros(1)}))
        distances.append(float(theta["w"] - 1))
    assert distances == pytest.approx([1.0, 0.8, 0.64, 0.512])


class Text(NamedTuple):
    """What a model made of some lanes."""

    nll_BS: Tensor
    hidden_BSD: Tensor
    words_BS: Tensor
    documents_BS: Tensor


def text_of(num_lanes: int, num_tokens: int, *, mean_len: int = 0, holes: bool = False) -> Text:
    """Few words, so that many come again; documents of about `mean_len` tokens."""
    draw = torch.Generator().manual_seed(5)
    hidden = torch.randn(num_lanes, num_tokens, WIDTH, generator=draw, dtype=torch.float64)
    nll = torch.rand(num_lanes, num_tokens, generator=draw, dtype=torch.float64) * 4 + 0.1
    words, documents = tokens_of(num_lanes, num_tokens, high=6), torch.zeros(num_lanes, num_tokens, dtype=torch.int64)
    if mean_len:
        documents = (torch.rand(num_lanes, num_tokens, generator=draw) < 1 / mean_len).long().cumsum(-1)
    if holes:
        documents[torch.rand(num_lanes, num_tokens, generator=draw) < 0.2] = EMPTY
    return Text(nll, hidden, words, documents)


def cached(text: Text, *, window: int, lengths: list[int], share: float = 0.3, theta: float = 0.7) -> Tensor:
    like = text.hidden_BSD
    cache = empty_cache(num_lanes=like.shape[0], window=window, width=WIDTH, like=like)
    parts = []
    for nll_BT, *segment in zip(*(one.split(lengths, dim=1) for one in text), strict=True):
        part, cache = cache_losses(nll_BT, NeuralCache(*segment), cache, share=share, theta=theta)
        parts.append(part)
    return torch.cat(parts, dim=1)


def naive_cached(text: Text, *, window: int, share: float = 0.3, theta: float = 0.7) -> list[list[float]]:
    """Number by number."""
    losses = []
    for nll, hidden, words, documents in zip(*(one.tolist() for one in text), strict=True):
        own = []
        for t in range(len(words)):
            known = [j for j in range(max(0, t - window), t) if documents[j] == documents[t] and documents[t] != EMPTY]
            weights = [
                math.exp(theta * math.fsum(a * b for a, b in zip(hidden[t], hidden[j], strict=True))) for j in known
            ]
            recalled = math.fsum(weight for j, weight in zip(known, weights, strict=True) if words[j] == words[t])
            p = math.exp(-nll[t])
            own.append(-math.log((1 - share) * p + share * recalled / math.fsum(weights)) if known else nll[t])
        losses.append(own)
    return losses


@pytest.mark.parametrize("lengths", [[31], [1] * 31, [5, 5, 5, 5, 5, 5, 1], [20, 3, 8]], ids=str)
@pytest.mark.parametrize("window", [1, 4, 13, 100])
@pytest.mark.parametrize("mean_len", [0, 7])
def test_the_cache_gives_what_a_naive_loop_gives(
    lengths: list[int], window: int, mean_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the text is cut into segments, and these into parts."""
    text = text_of(3, 31, mean_len=mean_len, holes=bool(mean_len))
    expected = torch.tensor(naive_cached(text, window=window), dtype=torch.float64)
    for most in (1, 100, 2**22):
        monkeypatch.setattr(dynamic_evaluation, "MOST_SCORES", most)
        found = cached(text, window=window, lengths=lengths)
        torch.testing.assert_close(found, expected, atol=1e-11, rtol=0)


def test_each_lane_has_a_cache_of_its_own() -> None:
    text = text_of(3, 31)
    together = cached(text, window=8, lengths=[16, 15])
    for lane in range(3):
        alone = cached(Text(*(one[lane : lane + 1] for one in text)), window=8, lengths=[16, 15])
        torch.testing.assert_close(together[lane : lane + 1], alone, atol=1e-12, rtol=0)


def test_no_word_is_known_before_it_was_scored() -> None:
    text = text_of(2, 31)
    words = text.words_BS.clone()
    words[:, -1] = (words[:, -1] + 1) % 6
    for lengths in ([31], [15, 15, 1]):
        first = cached(text, window=100, lengths=lengths)
        second = cached(text._replace(words_BS=words), window=100, lengths=lengths)
        assert torch.equal(first[:, :-1], second[:, :-1])
        assert bool((first[:, -1] != second[:, -1]).all())


@pytest.mark.parametrize("theta", [0.0, 0.7, 40.0])
def test_the_mixture_is_a_distribution(theta: float) -> None:
    """Over all words that may follow, also where products are large."""
    text = text_of(1, 20)
    p_model = torch.rand(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).softmax(0)
    total = 0.0
    for word in range(6):
        words, nll = text.words_BS.clone(), text.nll_BS.clone()
        words[0, -1], nll[0, -1] = word, -p_model[word].log()
        one = text._replace(words_BS=words, nll_BS=nll)
        total += float(cached(one, window=9, lengths=[20], theta=theta)[0, -1].neg().exp())
    assert total == pytest.approx(1.0, abs=1e-12)


def test_a_share_of_nothing_is_the_model_bit_for_bit_and_an_empty_cache_too() -> None:
    text = text_of(2, 31, mean_len=3)
    assert torch.equal(cached(text, window=5, lengths=[31], share=0.0), text.nll_BS)
    apart = text._replace(documents_BS=torch.arange(31).expand(2, -1))
    assert torch.equal(cached(apart, window=5, lengths=[31]), text.nll_BS)
