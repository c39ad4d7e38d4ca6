"""Every variant of the network computes the same as `helpers.naive_model`, which implements the papers in plain
floats."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.models import POSITIONS, RECURRENT, VARIANTS, random_tokens, tiny_model
from tests.helpers.naive_model import NaiveMemory, NaiveModel
from txl_dist.model.memory import attended
from txl_dist.model.transformer_xl import Batch, SegmentLoss, TransformerXL

LENGTHS = (5, 5, 2, 5)
"""Segments, so that memories of 3 and 11 tokens are shorter and longer than they are."""
ABSOLUTE_WITH_MEMORY = {"positions": "absolute", "absolute_with_memory": True}
WITH_MEMORY: dict[str, dict[str, Any]] = {**RECURRENT, "absolute_with_memory": ABSOLUTE_WITH_MEMORY}
DOCUMENTS = torch.tensor(
    [
        [0, 0, 0, 0, 4, 4, 5, 5, 5, 5, 5, 5, 5, 5, 6, 6, 6],  # a border inside a segment, and inside memories
        [2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 8, 9, 9, 9, 9, 9, 9],  # borders where segments begin
    ]
)


def assert_equal_to_naive(
    model: TransformerXL,
    *,
    memory_len: int,
    document_BS: Tensor | None,
    lengths: Sequence[int] = LENGTHS,
    zeros_attended: bool = False,
) -> None:
    """Losses and memories after each segment agree to 1e-10 with those of the naive model.

    `zeros_attended` begins with a memory of zeros that are seen, instead of none.
    """
    naive, losses_of = NaiveModel(model), SegmentLoss(model)
    tokens_BS = random_tokens(2, sum(lengths) + 1)
    memory = model.empty_memory(num_lanes=2, memory_len=memory_len)
    naive_memories, start = [naive.empty_memory() for _ in range(2)], 0
    if zeros_attended:
        memory = attended(memory)
        zeros = [[[0.0] * model.section.width] * memory_len] * model.section.num_layers
        naive_memories = [NaiveMemory(zeros, [0] * memory_len)] * 2
    for length in lengths:
        here = slice(start, start + length)
        tokens_BT, targets_BT = tokens_BS[:, here], tokens_BS[:, start + 1 : start + length + 1]
        document_BT = None if document_BS is None else document_BS[:, here]
        nll_BT, memory = losses_of(Batch(tokens_BT, targets_BT, torch.ones(2, length), document_BT), memory)
        documents = torch.zeros_like(tokens_BT) if document_BT is None else document_BT
        for lane in range(2):
            expected, naive_memories[lane] = naive.segment(
                tokens_BT[lane].tolist(),
                targets_BT[lane].tolist(),
                naive_memories[lane],
                memory_len=memory_len,
                documents=documents[lane].tolist(),
            )
            assert (nll_BT[lane] - torch.tensor(expected, dtype=torch.float64)).abs().max() <= 1e-10
            filled = memory.document_BM[lane] >= 0
            assert memory.document_BM[lane, filled].tolist() == naive_memories[lane].documents
            for hidden_BMD, expected_MD in zip(memory.hidden, naive_memories[lane].hidden_LMD, strict=True):
                own = filled[filled.shape[0] - hidden_BMD.shape[1] :]
                assert_same_states(hidden_BMD[lane, own], expected_MD)
        start += length


def assert_same_states(hidden_MD: Tensor, naive_MD: list[list[float]]) -> None:
    assert len(hidden_MD) == len(naive_MD)
    if naive_MD:
        assert (hidden_MD - torch.tensor(naive_MD, dtype=torch.float64)).abs().max() <= 1e-10


@pytest.mark.parametrize("document_BS", [None, DOCUMENTS], ids=["carried", "documents"])
@pytest.mark.parametrize(
    ("name", "memory_len"),
    [*((name, memory_len) for name in WITH_MEMORY for memory_len in (0, 3, 11)), ("absolute", 0)],
)
@pytest.mark.parametrize("norm", ["post_norm", "pre_norm"])
@torch.no_grad()
def test_positions_memories_and_documents_are_those_of_the_papers(
    name: str, memory_len: int, norm: str, document_BS: Tensor | None
) -> None:
    positions = {**POSITIONS, **WITH_MEMORY}[name]
    model = tiny_model(dtype=torch.float64, num_layers=2, pre_norm=norm == "pre_norm", **positions)
    assert_equal_to_naive(model, memory_len=memory_len, document_BS=document_BS)


@pytest.mark.parametrize("same_length", ["memory", "memory_and_self"])
@pytest.mark.parametrize("memory_len", [3, 11])
@pytest.mark.parametrize("name", WITH_MEMORY)
@torch.no_grad()
def test_windows_are_those_of_the_peers(name: str, memory_len: int, same_length: str) -> None:
    model = tiny_model(dtype=torch.float64, num_layers=2, same_length=same_length, **WITH_MEMORY[name])
    for document_BS in (None, DOCUMENTS):
        assert_equal_to_naive(model, memory_len=memory_len, document_BS=document_BS)


@pytest.mark.parametrize("same_length", ["off", "memory"])
@pytest.mark.parametrize("name", WITH_MEMORY)
@torch.no_grad()
def test_a_memory_of_attended_zeros_is_what_hugging_face_and_tensorflow_begin_with(name: str, same_length: str) -> None:
    model = tiny_model(dtype=torch.float64, num_layers=2, same_length=same_length, pre_norm=True, **WITH_MEMORY[name])
    for memory_len in (3, 11):
        assert_equal_to_naive(model, memory_len=memory_len, document_BS=None, zeros_attended=True)
    tokens_BS = random_tokens(2, 6)
    empty = model.empty_memory(num_lanes=2, memory_len=11)
    difference = (model(tokens_BS, attended(empty))[0] - model(tokens_BS, empty)[0]).abs()
    assert difference.max() > 1e-3, "they are felt"


@torch.no_grad()
def test_absolute_positions_tell_a_segment_from_its_memory_no_more_than_from_itself() -> None:
    """The paper's argument (section 3.3): a token of the past is remembered as the same one of now, at its position."""
    tokens_BT = random_tokens(2, 5)
    for name, is_blind in (("absolute_with_memory", True), ("relative", False)):
        model = tiny_model(dtype=torch.float64, **WITH_MEMORY[name])
        _, once = model(tokens_BT, model.empty_memory(num_lanes=2, memory_len=5))
        _, twice = model(tokens_BT, once)
        # Inputs of the second layer, where the first one has seen the text once, and where it has seen it twice.
        last = [memory.hidden[1][:, -1] for memory in (once, twice)]
        assert torch.allclose(*last, rtol=0, atol=1e-12) is is_blind


@pytest.mark.parametrize("document_BS", [None, DOCUMENTS], ids=["carried", "documents"])
@pytest.mark.parametrize(
    "settings",
    [*RECURRENT.values(), {"same_length": "memory"}, {"same_length": "memory_and_self"}, VARIANTS["modern"]],
    ids=[*RECURRENT, "memory", "memory_and_self", "modern"],
)
@torch.no_grad()
def test_layers_remember_as_much_as_each_is_told(settings: dict[str, Any], document_BS: Tensor | None) -> None:
    for memory_lens in ((11, 3, 1), (7, 2, 7), (3, 11, 1), (4, 0, 2)):
        mixes_values_it_lacks = "value_residual" in settings and memory_lens[0] < max(memory_lens)
        if mixes_values_it_lacks or ("same_length" in settings and not all(memory_lens)):
            continue  # refused
        model = tiny_model(dtype=torch.float64, memory_lens=memory_lens, **settings)
        for memory_len in (max(memory_lens), 2, 13):
            assert_equal_to_naive(model, memory_len=memory_len, document_BS=document_BS)


OPTIONS: dict[str, dict[str, Any]] = {
    "final_norm": {"pre_norm": True, "final_norm": True},
    "own_biases": {"share_biases": False},
    "own_biases_of_learned_distances": {"share_biases": False, **POSITIONS["learned_relative"]},
    "clamp_len": {"clamp_len": 2},
    "clamp_len_of_absolute_positions": {"clamp_len": 2, **POSITIONS["absolute"]},
    "clamp_len_below_the_table": {"clamp_len": 2, **POSITIONS["learned_relative"]},
    "clamp_len_at_the_last_row": {"clamp_len": 3, "positions": "learned_relative", "num_distances": 4},
    "clamp_len_beyond_the_table": {"clamp_len": 7, "positions": "learned_relative", "num_distances": 4},
    "one_distance": {"positions": "learned_relative", "num_distances": 1},
    "more_distances_than_keys": {"positions": "learned_relative", "num_distances": 40},
    "gelu": {"activation": "gelu"},
    "relu2": {"activation": "relu2"},
    "swiglu": {"activation": "swiglu"},
    "swiglu_pre_norm": {"activation": "swiglu", "pre_norm": True},
    "rms": {"norm": "rms", "norm_eps": 0.3},
    "rms_pre_norm": {"norm": "rms", "pre_norm": True, "final_norm": True},
    "query_key_norm": {"query_key_norm": True, "norm_eps": 0.1},
    "query_key_norm_of_learned_distances": {"query_key_norm": True, **POSITIONS["learned_relative"]},
    "query_key_norm_of_absolute_positions": {"query_key_norm": True, **POSITIONS["absolute"]},
    "residual_scalars": {"residual_scalars": True},
    "residual_scalars_of_absolute_positions": {"residual_scalars": True, **POSITIONS["absolute"]},
    "value_residual": {"value_residual": True},
    "value_residual_with_bias": {"value_residual": True, "value_bias": True, "pre_norm": True},
    "value_residual_of_absolute_positions": {"value_residual": True, **POSITIONS["absolute"]},
    "everything_modern": VARIANTS["modern"],
    "everything_modern_post_norm": VARIANTS["modern_post_norm"],
    "value_bias": {"value_bias": True},
    "output_bias": {"output_bias": True},
    "unscaled_embedding": {"scale_embedding": False},
    "unscaled_embedding_with_absolute_positions": {"scale_embedding": False, **POSITIONS["absolute"]},
    "large_norm_eps": {"norm_eps": 0.3, "pre_norm": True, "final_norm": True},
    "large_norm_eps_post_norm": {"norm_eps": 0.3},
    "odd_width": {"width": 11},
    "odd_width_of_absolute_positions": {"width": 11, **POSITIONS["absolute"]},
    "everything_of_labml": {
        "pre_norm": True,
        "final_norm": True,
        "value_bias": True,
        "output_bias": True,
        "scale_embedding": False,
        "share_biases": False,
        **POSITIONS["learned_relative"],
    },
    "narrow_embedding": {"embed_width": 6},
    "narrow_embedding_tied_projection": {"embed_width": 6, "tie_projections": (True,)},
    "wide_embedding": {"embed_width": 15, "tie_projections": (False,)},
    "untied": {"tie_weights": False},
    "untied_narrow_embedding": {"tie_weights": False, "embed_width": 6, "tie_projections": (True,)},
    "cutoffs": {"cutoffs": (5, 20)},
    "cutoffs_untied": {"cutoffs": (5, 20), "tie_weights": False},
    "cutoffs_narrow": {"cutoffs": (5, 20), "embed_width": 6, "tie_projections": (True, False, True)},
    "cutoffs_narrow_untied": {"cutoffs": (5, 20), "embed_width": 6, "tie_weights": False},
    "div_2": {"cutoffs": (5, 20), "div_value": 2},
    "div_2_untied": {"cutoffs": (5, 20), "div_value": 2, "tie_weights": False},
    "div_2_tied_projections": {"cutoffs": (5, 20), "div_value": 2, "tie_projections": (False, True, True)},
    "div_2_tied_projections_untied": {
        "cutoffs": (5, 20),
        "div_value": 2,
        "tie_weights": False,
        "tie_projections": (True, False, True),
    },
    "div_2_same_width": {"cutoffs": (5, 20), "div_value": 2, "project_same_width": False},
    "div_2_same_width_in_a_tail": {"cutoffs": (5, 20), "div_value": 2, "embed_width": 24, "project_same_width": False},
    "div_2_narrow": {"cutoffs": (5, 20), "div_value": 2, "embed_width": 9, "tie_projections": (True, True, False)},
    "div_2_one_table": {"div_value": 2},
    "div_2_one_table_same_width": {"div_value": 2, "project_same_width": False},
    "div_4": {"cutoffs": (5,), "div_value": 4, "tie_projections": (True, True)},
    "div_4_wide_same_width": {"cutoffs": (5, 30), "div_value": 4, "embed_width": 48, "project_same_width": False},
    "one_word_in_the_head": {"cutoffs": (1, 2, 49), "div_value": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_each_option_does_what_its_source_says(name: str) -> None:
    model = tiny_model(dtype=torch.float64, num_layers=3, **OPTIONS[name])
    assert_equal_to_naive(
        model, memory_len=0 if model.section.positions == "absolute" else 7, document_BS=DOCUMENTS, lengths=(5, 5, 2)
    )


CHOICES: dict[str, list[Any]] = {
    "positions": ["relative", "learned_relative", "absolute"],
    "clamp_len": [0, 4],
    "pre_norm": [False, True],
    "share_biases": [False, True],
    "activation": ["relu", "gelu"],
    "value_bias": [False, True],
    "output_bias": [False, True],
    "scale_embedding": [False, True],
    "norm_eps": [1e-5, 1e-2],
    "embed_width": [0, 8, 24],
    "cutoffs": [(), (5, 20)],
    "div_value": [1, 2],
    "project_same_width": [False, True],
    "tie_weights": [False, True],
}


def drawn_settings(draw: random.Random) -> tuple[dict[str, Any], int, Tensor | None]:
    """(settings, memory length, documents), the settings as `check_config` allows them together."""
    settings = {key: draw.choice(values) for key, values in CHOICES.items()}
    settings["final_norm"] = settings["pre_norm"] and draw.random() < 0.5
    settings["tie_projections"] = tuple(draw.random() < 0.5 for _ in (0, *settings["cutoffs"]))
    memory_len = 0 if settings["positions"] == "absolute" else draw.choice([0, 3, 11])
    if settings["positions"] == "learned_relative":
        settings["num_distances"] = draw.choice([3, 8, 20])
    if memory_len:
        settings["same_length"] = draw.choice(["off", "memory", "memory_and_self"])
    return settings, memory_len, draw.choice([None, DOCUMENTS])


@pytest.mark.parametrize("seed", range(40))
@torch.no_grad()
def test_options_drawn_together_do_not_disturb_each_other(seed: int) -> None:
    settings, memory_len, document_BS = drawn_settings(random.Random(seed))
    model = tiny_model(dtype=torch.float64, num_layers=2, **settings)
    assert_equal_to_naive(model, memory_len=memory_len, document_BS=document_BS, lengths=(5, 5, 2))
