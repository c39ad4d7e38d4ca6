"""Training on the recent half of each segment's targets, compared with losses of single tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.models import VOCAB_SIZE, random_tokens, tiny_model
from tests.helpers.tiny import tiny_config
from txl_dist.config.load import plan_batch
from txl_dist.config.schema import TrainSection
from txl_dist.data.loader.stream import Segment, plain_segment
from txl_dist.model.transformer_xl import SegmentLoss
from txl_dist.train.batch import BatchMaker, StepInput, batch_maker
from txl_dist.train.stepper import Stepper

EDGES = (0, VOCAB_SIZE)
HALF = BatchMaker(EDGES, EDGES, mask_documents=False, rows_multiple=1).for_training(half_loss=True)


@pytest.mark.parametrize(
    ("segment_len", "scored"), [(1, [1]), (2, [0, 1]), (5, [0, 0, 1, 1, 1]), (6, [0, 0, 0, 1, 1, 1])]
)
def test_the_recent_half_is_scored_and_of_an_odd_length_the_middle_too(segment_len: int, scored: list[int]) -> None:
    tokens = np.arange(2 * (segment_len + 1)).reshape(2, segment_len + 1)
    assert HALF.batch(plain_segment(tokens)).scored_BT.tolist() == [scored, scored]
    assert TrainSection(segment_len=segment_len, half_loss=True).scored_len == sum(scored)
    assert TrainSection(segment_len=segment_len).scored_len == segment_len


def test_what_is_not_scored_anyway_is_not_scored_in_the_recent_half_either() -> None:
    tokens, documents = np.arange(7)[None], np.array([[0, 0, 0, 0, 1, 1, 1]])
    lost = np.array([[True] * 5 + [False]])
    segment = Segment(tokens, documents, np.zeros((1, 6), dtype=bool), lost)
    masked = HALF._replace(mask_documents=True)
    assert HALF.batch(segment).scored_BT.tolist() == [[0, 0, 0, 1, 1, 0]]
    assert masked.batch(segment).scored_BT.tolist() == [[0, 0, 0, 0, 1, 0]], "a document begins without an end-of-text"


@pytest.mark.parametrize("memory_len", [0, 3])
@pytest.mark.parametrize("segment_len", [4, 5])
def test_loss_and_gradients_are_those_of_the_recent_targets_one_by_one(segment_len: int, memory_len: int) -> None:
    model = tiny_model(dtype=torch.float64, cutoffs=(5, 20))
    train = TrainSection(segment_len=segment_len, half_loss=True)
    maker = batch_maker(model, mask_documents=False).for_training(half_loss=train.half_loss)
    tokens_BS = random_tokens(3, 3 * segment_len + 1)
    memory = expected_memory = model.empty_memory(num_lanes=3, memory_len=memory_len)
    for start in range(0, 3 * segment_len, segment_len):
        piece = tokens_BS[:, start : start + segment_len + 1]
        batch = maker.batch(plain_segment(piece.numpy()))
        batch = batch._replace(scored_BT=batch.scored_BT.double())  # else a weight of 1/9 has 24 bits
        loss, memory = SegmentLoss(model)(batch, memory, normalizer=3.0 * train.scored_len)
        found = torch.autograd.grad(loss, list(model.parameters()))

        hidden_BTD, expected_memory = model(piece[:, :-1], expected_memory)
        recent = [(lane, i) for lane in range(3) for i in range(segment_len // 2, segment_len)]
        log_p_SV = model.softmax.log_probabilities(torch.stack([hidden_BTD[place] for place in recent]))
        losses = [-log_p_V[piece[lane, i + 1]] for log_p_V, (lane, i) in zip(log_p_SV, recent, strict=True)]
        expected = torch.stack(losses).sum() / len(losses)
        gradients = torch.autograd.grad(expected, list(model.parameters()))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
        assert max(float((a - b).abs().max()) for a, b in zip(found, gradients, strict=True)) < 1e-12


@pytest.mark.parametrize("half_loss", [False, True])
def test_the_loss_is_divided_by_the_tokens_that_are_scored(half_loss: bool) -> None:
    config = tiny_config(train={"segment_len": 7, "half_loss": half_loss})
    plan = plan_batch(config.train, world_size=1)
    unused: Any = None
    step_input = StepInput([], 0, unused)
    scored_len = config.train.scored_len
    stepper = Stepper(unused, unused, unused, plan, seed=0, first_lane=0, scored_len=scored_len)
    found = stepper._normalizer(step_input, "")
    assert found == plan.microbatch_lanes * (4 if half_loss else 7)


def test_evaluation_scores_all() -> None:
    model = tiny_model()
    maker = batch_maker(model, mask_documents=False)
    assert not maker.half_loss
    assert maker.batch(plain_segment(np.arange(14).reshape(2, 7))).scored_BT.all()
    assert maker.for_training(half_loss=False) == maker
