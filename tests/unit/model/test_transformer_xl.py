"""The network: the division into segments, lanes and documents does not change the result."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.models import POSITIONS, RECURRENT, VARIANTS, random_tokens, segment_losses, tiny_model
from txl_dist.config.schema import ModelSection
from txl_dist.model.flops import count_parameters
from txl_dist.model.transformer_xl import Batch, SegmentLoss

WITHOUT_MEMORY: dict[str, dict[str, Any]] = {
    "absolute": POSITIONS["absolute"],
    "absolute_pre_norm": {"pre_norm": True, "final_norm": True, "clamp_len": 4, **POSITIONS["absolute"]},
}
ALL = {**VARIANTS, **WITHOUT_MEMORY}
TOKENS = 24
SPLITS = [(8, 8, 8), (5, 11, 1, 7), (23, 1), (1,) * TOKENS]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_segment_split_changes_nothing(name: str, dtype: torch.dtype, tolerance: float) -> None:
    model = tiny_model(dtype=dtype, **VARIANTS[name])
    tokens_BS = random_tokens(2, TOKENS + 1)
    whole = segment_losses(model, tokens_BS, memory_len=TOKENS, lengths=(TOKENS,))
    assert whole.shape == (2, TOKENS)
    for lengths in SPLITS:
        split = segment_losses(model, tokens_BS, memory_len=TOKENS, lengths=lengths)
        assert (split - whole).abs().max() <= tolerance, lengths
    forgetful = segment_losses(model, tokens_BS, memory_len=0, lengths=(8, 8, 8))
    assert (forgetful - whole).abs().max() > 1e-3, "the memory matters"


@pytest.mark.parametrize(("same_length", "window"), [("memory", 7), ("memory_and_self", 8)])
@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("name", RECURRENT)
def test_same_length_is_a_sliding_window_that_no_segment_split_changes(
    name: str, pre_norm: bool, same_length: str, window: int
) -> None:
    model = tiny_model(dtype=torch.float64, same_length=same_length, pre_norm=pre_norm, **RECURRENT[name])
    tokens_BS = random_tokens(2, TOKENS + 1)
    whole = segment_losses(model, tokens_BS, memory_len=7, lengths=(TOKENS,))
    for lengths in SPLITS:
        assert (segment_losses(model, tokens_BS, memory_len=7, lengths=lengths) - whole).abs().max() <= 1e-10
    changed = tokens_BS.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 50
    difference = (segment_losses(model, changed, memory_len=7, lengths=(TOKENS,)) - whole).abs()
    # Three layers of a window reach 3 * (window - 1) positions back, and no farther.
    reach = 3 * (window - 1)
    assert (difference[:, reach] > 0).all()
    assert (difference[:, reach + 1 :] <= 1e-12).all()


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_a_memory_keeps_its_shape_whatever_the_segments_are(name: str) -> None:
    model = tiny_model(**VARIANTS[name])
    for memory_len in (0, 1, 5, 30):
        memory, seen = model.empty_memory(num_lanes=2, memory_len=memory_len), 0
        for length in (4, 1, 9, 2):
            hidden, memory = model(random_tokens(2, length), memory)
            seen += length
            assert hidden.shape == (2, length, 12)
            assert torch.stack(memory.hidden).shape == (3, 2, memory_len, 12)
            assert (memory.document_BM >= 0).sum(1).tolist() == [min(seen, memory_len)] * 2


@pytest.mark.parametrize("name", ALL)
def test_lanes_are_independent(name: str) -> None:
    model, memory_len = tiny_model(dtype=torch.float64, **ALL[name]), 0 if name in WITHOUT_MEMORY else 5
    tokens_BS = random_tokens(4, 13)
    changed = tokens_BS.clone()
    changed[1] = (changed[1] + 7) % 50
    before = segment_losses(model, tokens_BS, memory_len=memory_len, lengths=(4, 4, 4))
    after = segment_losses(model, changed, memory_len=memory_len, lengths=(4, 4, 4))
    assert (after[[0, 2, 3]] - before[[0, 2, 3]]).abs().max() <= 1e-12
    assert ((after[1] - before[1]).abs() > 1e-3).any()
    alone = torch.cat([segment_losses(model, row[None], memory_len=memory_len, lengths=(4, 4, 4)) for row in tokens_BS])
    assert (alone - before).abs().max() <= 1e-12


@pytest.mark.parametrize("name", ALL)
def test_losses_are_causal(name: str) -> None:
    model, memory_len = tiny_model(dtype=torch.float64, **ALL[name]), 0 if name in WITHOUT_MEMORY else 12
    tokens_BS = random_tokens(2, 13)
    before = segment_losses(model, tokens_BS, memory_len=memory_len, lengths=(6, 6))
    for position in (0, 3, 5, 6, 11):
        changed = tokens_BS.clone()
        changed[:, position] = (changed[:, position] + 7) % 50
        difference = (segment_losses(model, changed, memory_len=memory_len, lengths=(6, 6)) - before).abs()
        # Loss p is that of token p + 1, given the tokens up to p; without memory, those of its segment.
        end_of_reach = 12 if memory_len else 6 * (position // 6 + 1)
        assert (difference[:, : max(0, position - 1)] <= 1e-12).all()
        assert (difference[:, position:end_of_reach] > 1e-6).any(0).all(), "every later loss sees the token"
        assert (difference[:, end_of_reach:] <= 1e-12).all()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", RECURRENT)
def test_a_forward_pass_cannot_disturb_the_memory_it_was_given(name: str, training: bool) -> None:
    model = tiny_model(dropout=0.2, cutoffs=(5, 20), **RECURRENT[name]).train(training)
    _, memory = model(random_tokens(2, 6), model.empty_memory(num_lanes=2, memory_len=4))
    copy = memory._replace(hidden=tuple(torch.stack(memory.hidden).clone()), document_BM=memory.document_BM.clone())
    for length in (1, 3, 4, 9):
        hidden, after = model(random_tokens(2, length), memory)
        model.softmax(hidden, random_tokens(2, length)).sum().backward()
        for layer in after.hidden:
            layer.zero_()
        assert torch.equal(torch.stack(memory.hidden), torch.stack(copy.hidden))
        assert torch.equal(memory.document_BM, copy.document_BM)


def test_evaluating_between_two_steps_changes_no_training_loss() -> None:
    losses = []
    for evaluate in (False, True):
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        memory = model.empty_memory(num_lanes=2, memory_len=6)
        for step in range(3):
            tokens_BS = random_tokens(2, 5, seed=step)
            hidden, memory = model(tokens_BS[:, :-1], memory)
            loss = model.softmax(hidden, tokens_BS[:, 1:]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if evaluate:
                with torch.no_grad():
                    segment_losses(model.eval(), random_tokens(3, 9, seed=9), memory_len=4, lengths=(4, 4))
                model.train()
    assert torch.equal(torch.stack(losses[:3]), torch.stack(losses[3:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ALL)
def test_recomputing_activations_changes_neither_loss_nor_gradients_by_a_bit(name: str, dtype: torch.dtype) -> None:
    results, memory_len = [], 0 if name in WITHOUT_MEMORY else 8
    for recompute_every in (0, 1, 2):
        model = tiny_model(dtype=dtype, dropout=0.3, attention_dropout=0.2, **ALL[name])
        model.recompute_every = recompute_every
        _, memory = model(random_tokens(2, 5), model.empty_memory(num_lanes=2, memory_len=memory_len))
        torch.manual_seed(5)
        hidden, after = model(random_tokens(2, 6, seed=1), memory)
        loss = model.softmax(hidden, random_tokens(2, 6, seed=2)).mean()
        loss.backward()
        results.append([loss.detach(), torch.stack(after.hidden), *(p.grad for p in model.parameters())])
    for recomputed in results[1:]:
        assert all(a is not None and torch.equal(a, b) for a, b in zip(results[0], recomputed, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_every_parameter_gets_a_gradient_from_every_segment(name: str) -> None:
    model, memory_len = tiny_model(**ALL[name]), 0 if name in WITHOUT_MEMORY else 3
    # The most frequent word only: all tail clusters are without targets.
    tokens_BT = torch.zeros(1, 2, dtype=torch.int64)
    hidden, _ = model(tokens_BT, model.empty_memory(num_lanes=1, memory_len=memory_len))
    model.softmax(hidden, tokens_BT).sum().backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []


def test_the_loss_of_a_batch_is_the_sum_of_its_scored_losses_over_the_normalizer() -> None:
    model = tiny_model(cutoffs=(5, 20))
    tokens_BT, targets_BT = random_tokens(3, 6, seed=1), random_tokens(3, 6, seed=2)
    scored_BT = torch.rand(3, 6, generator=torch.Generator().manual_seed(0)).round()
    batch = Batch(tokens_BT, targets_BT, scored_BT, None)
    memory = model.empty_memory(num_lanes=3, memory_len=4)
    nll_BT, _ = SegmentLoss(model)(batch, memory)
    loss, _ = SegmentLoss(model)(batch, memory, 11.0)
    assert nll_BT.shape == (3, 6)
    assert loss.item() == pytest.approx((nll_BT * scored_BT).sum().item() / 11, rel=1e-6)


def test_gradients_of_microbatches_add_up_to_those_of_the_batch() -> None:
    model = tiny_model(dtype=torch.float64, cutoffs=(5, 20), div_value=2)
    tokens_BS = random_tokens(4, 7)

    def backward(lanes: slice) -> None:
        tokens = tokens_BS[lanes]
        batch = Batch(tokens[:, :-1], tokens[:, 1:], torch.ones(tokens.shape[0], 6), None)
        memory = model.empty_memory(num_lanes=tokens.shape[0], memory_len=4)
        SegmentLoss(model)(batch, memory, 24.0)[0].backward()

    backward(slice(0, 4))
    whole = {key: parameter.grad.clone() for key, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    for first in range(0, 4, 2):
        backward(slice(first, first + 2))
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad - whole[key]).abs().max() <= 1e-12, key


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_tied", [True, False])
def test_only_an_untied_embedding_makes_a_dense_gradient_of_its_own(is_tied: bool) -> None:
    model = tiny_model(tie_weights=is_tied)
    batch = Batch(random_tokens(2, 6, seed=1), random_tokens(2, 6, seed=2), torch.ones(2, 6), None)
    memory = model.empty_memory(num_lanes=2, memory_len=4)
    with Operations() as operations:
        SegmentLoss(model)(batch, memory, 12.0)[0].backward()
    assert operations.counts["aten::embedding_dense_backward"] == (0 if is_tied else 1)
    gradient = model.embedding.weight(0).grad
    assert gradient is not None
    assert gradient.layout == torch.strided
    assert (gradient[batch.tokens_BT] != 0).any(-1).all()


@pytest.mark.parametrize(
    ("settings", "vocab_size", "expected"),
    [
        ({"num_layers": 12, "width": 512, "num_heads": 8, "head_width": 64, "ff_width": 2048}, 204, 41_055_436),
        (
            {
                "num_layers": 16,
                "width": 410,
                "num_heads": 10,
                "head_width": 41,
                "ff_width": 2100,
                "cutoffs": (20_000, 40_000, 200_000),
            },
            267_735,
            151_107_538,
        ),
        (
            {
                "num_layers": 18,
                "width": 1024,
                "num_heads": 16,
                "head_width": 64,
                "ff_width": 4096,
                "cutoffs": (20_000, 40_000, 200_000),
                "div_value": 4,
                "tie_projections": (False, True, True, True),
            },
            267_735,
            285_170_506,
        ),
    ],
    ids=["enwik8_base", "wt103_base", "wt103_large"],
)
def test_the_models_of_the_paper_have_the_original_number_of_parameters(
    settings: dict[str, Any], vocab_size: int, expected: int
) -> None:
    assert count_parameters(ModelSection.model_validate(settings), vocab_size=vocab_size) == expected
