"""The model with a cache computes the same as the plain model, in buffers that neither grow nor move."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.models import POSITIONS, RECURRENT, VARIANTS, VOCAB_SIZE, random_tokens, tiny_model
from tests.helpers.naive_model import NaiveModel
from txl_dist.errors import ConfigError
from txl_dist.inference.bundle import PROBE_TOLERANCE
from txl_dist.inference.kv_cache import BLOCK_LEN, FrozenModel, KVCache
from txl_dist.model.memory import EMPTY, Memory, attended
from txl_dist.model.transformer_xl import TransformerXL

CASES: list[tuple[str, dict[str, Any]]] = [
    *VARIANTS.items(),
    ("adaptive_div_4_nothing_tied", {"cutoffs": (5, 20), "div_value": 4, "tie_weights": False, "share_biases": False}),
    *(
        (f"{same_length}_{name}", {"same_length": same_length, "pre_norm": name == "relative", **settings})
        for same_length in ("memory", "memory_and_self")
        for name, settings in RECURRENT.items()
    ),
]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11}
CHUNK_LEN = 2 * BLOCK_LEN["cpu"] + 22


def lengths_of(num_tokens: int, *, chunk_len: int, seed: int = 0) -> list[int]:
    """Of chunks, at random: single tokens, whole ones and those between."""
    draw, lengths = random.Random(seed), []
    while sum(lengths) < num_tokens:
        lengths.append(min(draw.choice([1, chunk_len, draw.randint(1, chunk_len)]), num_tokens - sum(lengths)))
    return lengths


def documents_of(*shape: int, mean_len: int, seed: int = 0) -> Tensor:
    """Of tokens: each begins a new one with a chance of 1 in `mean_len`."""
    begins = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 1 / mean_len
    return begins.long().cumsum(-1)


@torch.no_grad()
def assert_same(
    model: TransformerXL,
    memory: Memory,
    ring: KVCache,
    *,
    lengths: Sequence[int],
    document_BS: Tensor | None = None,
    tolerance: float,
    seed: int = 0,
) -> tuple[Memory, KVCache]:
    """Chunk by chunk the hidden states, losses and log-probabilities of the plain model and of the cached core."""
    frozen, start, num_rows = FrozenModel(model), 0, memory.document_BM.shape[0]
    tokens_BS = random_tokens(num_rows, sum(lengths) + 1, seed=seed)
    for length in lengths:
        here, document_BT = slice(start, start + length), None
        if document_BS is not None:
            document_BT = document_BS[:, here]
        targets_BT = tokens_BS[:, start + 1 : start + length + 1]
        expected, memory = model(tokens_BS[:, here], memory, document_BT=document_BT)
        hidden = frozen.run(tokens_BS[:, here], ring, document_BT=document_BT)
        assert (hidden - expected).abs().max() <= tolerance
        difference = frozen.losses(hidden, targets_BT) - model.softmax(expected, targets_BT)
        assert difference.abs().max() <= tolerance
        log_p = model.softmax.log_probabilities(expected[:, -1])
        assert (frozen.log_probabilities(hidden[:, -1]) - log_p).abs().max() <= tolerance
        start += length
    assert ring.num_known.clip(max=ring.memory_len).tolist() == (memory.document_BM != EMPTY).sum(1).tolist()
    return memory, ring


@pytest.mark.parametrize("is_masked", [False, True], ids=["carried", "documents"])
@pytest.mark.parametrize(
    "memory_len", [6, *(pytest.param(memory_len, marks=pytest.mark.slow) for memory_len in (0, 1, 40))]
)
@pytest.mark.parametrize(("name", "settings"), CASES, ids=[name for name, _ in CASES])
def test_every_variant_gives_what_the_plain_model_gives(
    name: str, settings: dict[str, Any], memory_len: int, is_masked: bool
) -> None:
    if settings.get("same_length") == "memory" and memory_len == 0:
        return  # a query would see no key, not even itself
    for dtype, chunk_len in ((torch.float32, 9), (torch.float64, CHUNK_LEN)):
        model = tiny_model(dtype=dtype, **settings).eval()
        lengths = lengths_of(5 * (memory_len + chunk_len), chunk_len=chunk_len)
        ring = FrozenModel(model).ring(num_rows=2, memory_len=memory_len, chunk_len=chunk_len, with_documents=is_masked)
        assert_same(
            model,
            model.empty_memory(num_lanes=2, memory_len=memory_len),
            ring,
            lengths=lengths,
            document_BS=documents_of(2, sum(lengths), mean_len=7) if is_masked else None,
            tolerance=TOLERANCE[dtype],
        )


@pytest.mark.parametrize("is_masked", [False, True], ids=["carried", "documents"])
@pytest.mark.parametrize("memory_lens", [(6, 2, 4), (0, 6, 1), (3, 3, 6)])
@pytest.mark.parametrize(
    "settings",
    [{}, RECURRENT["learned_relative"], {"same_length": "memory_and_self"}],
    ids=["relative", "learned", "window"],
)
@torch.no_grad()
def test_layers_that_remember_differently_give_what_the_plain_model_gives(
    settings: dict[str, Any], memory_lens: tuple[int, ...], is_masked: bool
) -> None:
    if "same_length" in settings and not min(memory_lens):
        return  # refused
    model = tiny_model(dtype=torch.float64, memory_lens=memory_lens, **settings).eval()
    for memory_len in (6, 3, 11):
        lengths = lengths_of(50, chunk_len=9)
        ring = FrozenModel(model).ring(num_rows=2, memory_len=memory_len, chunk_len=9, with_documents=is_masked)
        memory = model.empty_memory(num_lanes=2, memory_len=memory_len)
        document_BS = documents_of(2, sum(lengths), mean_len=7) if is_masked else None
        _, ring = assert_same(model, memory, ring, lengths=lengths, document_BS=document_BS, tolerance=1e-11)
        assert [one.shape[2] for one in ring.past(0).key_values] == list(model.memory_of_layers(memory_len))
        sizes = [buffer.shape[3] for buffer in ring.key_values]
        assert sizes == [2 * length + 3 * 9 for length in ring.memory_lens], "a shorter memory is a smaller buffer"


@pytest.mark.parametrize("start", [0, 1, 4, 9])
@torch.no_grad()
def test_a_past_of_layers_that_remember_differently_goes_on_elsewhere(start: int) -> None:
    model = tiny_model(dtype=torch.float64, memory_lens=(2, 6, 4)).eval()
    frozen, tokens_BS = FrozenModel(model), random_tokens(2, 24)
    ring = frozen.ring(num_rows=2, memory_len=6, chunk_len=4)
    for first in range(0, start, 4):
        frozen.run(tokens_BS[:, first : min(start, first + 4)], ring)
    other = frozen.ring(num_rows=1, memory_len=6, chunk_len=7)
    other.put(0, ring.past(1))
    wider = ring.copied(memory_len=9, chunk_len=5)
    for length in (4, 1, 3, 4):
        here = slice(start, start + length)
        expected = frozen.run(tokens_BS[:, here], ring)
        assert (frozen.run(tokens_BS[1:, here], other) - expected[1:]).abs().max() <= 1e-11
        start += length
    made = other.past(0)
    taken_back = other.past(0, without_last=3)
    for kept, longer in zip(taken_back.key_values, made.key_values, strict=True):
        assert kept.shape == longer.shape, "nothing of the past is lost by taking back what was made since"
    assert wider.memory_lens == (2, 9, 4)


@torch.no_grad()
def test_a_past_that_lacks_positions_of_a_layer_is_seen_as_far_as_all_of_it_goes() -> None:
    """Scored with 2 tokens in the first layer, written on with 5: what was not kept is not made up."""
    model = tiny_model(dtype=torch.float64, memory_lens=(2, 9, 9)).eval()
    frozen, tokens_1S = FrozenModel(model), random_tokens(1, 20)
    scoring = frozen.ring(num_rows=1, memory_len=9, chunk_len=9)
    frozen.run(tokens_1S[:, :9], scoring)
    writing = frozen.ring(num_rows=1, memory_len=9, least_len=5)
    assert writing.memory_lens == (5, 9, 9)
    writing.put(0, scoring.past(0))
    shorter = frozen.ring(num_rows=1, memory_len=9, least_len=5)
    shorter.put(0, scoring.past(0, most=2))
    assert writing.num_known.tolist() == [2]
    for at in range(9, 12):
        token = tokens_1S[:, at : at + 1]
        assert torch.equal(frozen.run(token, writing), frozen.run(token, shorter))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["post_norm", pytest.param("labml_like", marks=pytest.mark.nightly)])
def test_ten_thousand_tokens_on_it_is_as_near(name: str) -> None:
    model = tiny_model(**VARIANTS[name]).eval()
    ring = FrozenModel(model).ring(num_rows=2, memory_len=50, chunk_len=30)
    memory = model.empty_memory(num_lanes=2, memory_len=50)
    lengths = lengths_of(10_000, chunk_len=30)
    assert_same(model, memory, ring, lengths=lengths, tolerance=TOLERANCE[torch.float32])


@pytest.mark.parametrize("is_masked", [False, True], ids=["carried", "documents"])
@pytest.mark.parametrize("name", RECURRENT)
@torch.no_grad()
def test_rows_are_the_number_by_number_model_however_they_are_cut(name: str, is_masked: bool) -> None:
    model = tiny_model(dtype=torch.float64, num_layers=2, **RECURRENT[name]).eval()
    frozen, naive = FrozenModel(model), NaiveModel(model)
    lengths, memory_len = (4, 1, 1, 3, 5), 6
    tokens_BS, document_BS = random_tokens(2, sum(lengths) + 1), documents_of(2, sum(lengths), mean_len=5)
    ring = frozen.ring(num_rows=2, memory_len=memory_len, chunk_len=5, with_documents=is_masked)
    memories, start = [naive.empty_memory() for _ in range(2)], 0
    for length in lengths:
        here, next_ones = slice(start, start + length), slice(start + 1, start + length + 1)
        document_BT = document_BS[:, here] if is_masked else None
        nll_BT = frozen.losses(frozen.run(tokens_BS[:, here], ring, document_BT=document_BT), tokens_BS[:, next_ones])
        for row in range(2):
            expected, memories[row] = naive.segment(
                tokens_BS[row, here].tolist(),
                tokens_BS[row, next_ones].tolist(),
                memories[row],
                memory_len=memory_len,
                documents=document_BS[row, here].tolist() if is_masked else [0] * length,
            )
            assert (nll_BT[row] - torch.tensor(expected, dtype=torch.float64)).abs().max() <= 1e-10
        start += length


def pasts_of(
    model: TransformerXL, lengths: Sequence[int], *, memory_len: int, is_masked: bool
) -> Iterator[tuple[Memory, KVCache]]:
    """Of texts of these lengths, that were read over a memory of `memory_len`: (what the plain model remembers, a ring
    that remembers it in row 1)."""
    for seed, length in enumerate(lengths):
        ring = FrozenModel(model).ring(num_rows=2, memory_len=memory_len, chunk_len=3, with_documents=is_masked)
        memory = model.empty_memory(num_lanes=2, memory_len=memory_len)
        document_BS = documents_of(2, length, mean_len=9, seed=seed) if is_masked else None
        cut = lengths_of(length, chunk_len=3, seed=seed)
        memory, ring = assert_same(
            model, memory, ring, lengths=cut, document_BS=document_BS, tolerance=TOLERANCE[torch.float64], seed=seed
        )
        yield Memory(tuple(torch.stack(memory.hidden)[:, 1:]), memory.document_BM[1:]), ring


@pytest.mark.parametrize("is_masked", [False, True], ids=["carried", "documents"])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(RECURRENT["relative"], marks=pytest.mark.slow),
        pytest.param(VARIANTS["labml_like"], marks=[pytest.mark.slow, pytest.mark.nightly]),
        {"same_length": "memory"},
    ],
)
@torch.no_grad()
def test_rows_with_pasts_of_different_lengths_go_on_together_wherever_the_ring_stands(
    settings: dict[str, Any], is_masked: bool
) -> None:
    model = tiny_model(dtype=torch.float64, **settings).eval()
    frozen, memory_len, chunk_len = FrozenModel(model), 11, 5
    size = memory_len + chunk_len
    # Rows that remember nothing, little, as much as there is room for, and more than that.
    given = list(pasts_of(model, (0, 4, memory_len, 29), memory_len=15, is_masked=is_masked))
    memory = Memory(
        tuple(torch.cat([torch.stack(plain.hidden)[:, :, -memory_len:] for plain, _ in given], dim=1)),
        torch.cat([plain.document_BM[:, -memory_len:] for plain, _ in given]),
    )
    for num_before in range(2 * size + 1):
        ring = frozen.ring(num_rows=4, memory_len=memory_len, chunk_len=chunk_len, with_documents=is_masked)
        for length in lengths_of(num_before, chunk_len=chunk_len, seed=num_before):
            documents = torch.zeros(4, length, dtype=torch.int64) if is_masked else None
            frozen.run(random_tokens(4, length), ring, document_BT=documents)
        for row, (_, theirs) in enumerate(given):
            ring.put(row, theirs.past(1))
        lengths = lengths_of(3 * size, chunk_len=chunk_len, seed=num_before)
        document_BS = 3 + documents_of(4, sum(lengths), mean_len=9) if is_masked else None
        assert_same(model, memory, ring, lengths=lengths, document_BS=document_BS, tolerance=TOLERANCE[torch.float64])


@pytest.mark.parametrize("is_masked", [False, True], ids=["carried", "documents"])
@torch.no_grad()
def test_rows_are_kept_doubled_and_put_in_another_order(is_masked: bool) -> None:
    model = tiny_model(dtype=torch.float64).eval()
    plain, rings = zip(*pasts_of(model, (0, 4, 29), memory_len=9, is_masked=is_masked), strict=True)
    ring = FrozenModel(model).ring(num_rows=3, memory_len=9, chunk_len=3, with_documents=is_masked)
    for row, theirs in enumerate(rings):
        ring.put(row, theirs.past(1))
    order = [2, 0, 2, 1]
    ring.select(order)
    assert ring.num_rows == 4
    memory = Memory(
        tuple(torch.cat([torch.stack(plain[row].hidden) for row in order], dim=1)),
        torch.cat([plain[row].document_BM for row in order]),
    )
    document_BS = 3 + documents_of(4, 30, mean_len=9) if is_masked else None
    lengths = lengths_of(30, chunk_len=3)
    assert_same(model, memory, ring, lengths=lengths, document_BS=document_BS, tolerance=TOLERANCE[torch.float64])


@pytest.mark.parametrize("start", ["empty", "half", "full", "zeros"])
@pytest.mark.parametrize("pre_norm", [False, True])
@torch.no_grad()
def test_a_memory_of_hidden_states_goes_on_as_keys_and_values(start: str, pre_norm: bool) -> None:
    model = tiny_model(dtype=torch.float64, pre_norm=pre_norm).eval()
    memory = model.empty_memory(num_lanes=2, memory_len=8)
    if start == "zeros":
        memory = attended(memory)  # as Hugging Face begins: zeros that are seen
    elif start != "empty":
        _, memory = model(random_tokens(2, 4 if start == "half" else 20), memory)
    frozen = FrozenModel(model)
    ring = frozen.ring(num_rows=2, memory_len=8, chunk_len=3)
    pasts = frozen.past_of(memory)
    for row, past in enumerate(pasts):
        ring.put(row, past)
    assert [len(past.document_S) for past in pasts] == [{"empty": 0, "half": 4}.get(start, 8)] * 2
    assert_same(model, memory, ring, lengths=lengths_of(30, chunk_len=3), tolerance=TOLERANCE[torch.float64])


@pytest.mark.parametrize("is_masked", [False, True], ids=["carried", "documents"])
@torch.no_grad()
def test_a_past_is_a_value_from_which_the_last_position_may_be_left_out(is_masked: bool) -> None:
    model = tiny_model(dtype=torch.float64).eval()
    ((_, ring),) = pasts_of(model, (29,), memory_len=9, is_masked=is_masked)
    past = ring.past(1)
    assert torch.stack(past.key_values).shape == (3, 2, 2, 9, 5)
    documents = torch.zeros(2, 1, dtype=torch.int64) if is_masked else None
    FrozenModel(model).run(random_tokens(2, 1), ring, document_BT=documents)
    before, long_before = ring.past(1, without_last=1), ring.past(1, without_last=4)
    assert torch.equal(torch.stack(before.key_values), torch.stack(past.key_values)), "though the memory was full"
    assert torch.equal(before.document_S, past.document_S)
    assert torch.equal(torch.stack(long_before.key_values)[:, :, :, -6:], torch.stack(past.key_values)[:, :, :, :6])
    assert len(long_before.document_S) == min(9, ring.size - 4), "as many are taken back as are run at a time"
    copy = torch.stack(past.key_values).clone()
    documents = torch.zeros(2, 3, dtype=torch.int64) if is_masked else None
    for _ in range(9):
        FrozenModel(model).run(random_tokens(2, 3), ring, document_BT=documents)
    assert torch.equal(torch.stack(past.key_values), copy), "the ring went on, and the past stayed"
    ring.put(0, past)
    assert torch.equal(torch.stack(ring.past(0).key_values), copy)


@torch.no_grad()
def test_the_inputs_of_all_layers_are_those_that_the_plain_model_remembers() -> None:
    model = tiny_model(dtype=torch.float64, pre_norm=True, final_norm=True).eval()
    frozen, tokens_BT = FrozenModel(model), random_tokens(2, 7)
    expected, memory = model(tokens_BT, model.empty_memory(num_lanes=2, memory_len=7))
    *inputs, hidden = frozen.run_embedded(
        model.embedding(tokens_BT), frozen.ring(num_rows=2, memory_len=3, chunk_len=7)
    )
    assert (torch.stack(inputs) - torch.stack(memory.hidden)).abs().max() <= TOLERANCE[torch.float64]
    assert (hidden - expected).abs().max() <= TOLERANCE[torch.float64]


class LargestResult(TorchDispatchMode):
    """Counts operations, and the elements of the largest result and of the largest copy."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.add(func._schema.name)
        is_view = isinstance(result, Tensor) and result._is_view()
        for one in result if isinstance(result, tuple) else (result,):
            if isinstance(one, Tensor) and not is_view and not func.is_view:
                self.num_elements = max(self.num_elements, one.numel())
        return result


@pytest.mark.parametrize("is_masked", [False, True], ids=["carried", "documents"])
@torch.inference_mode()
def test_nothing_of_the_past_is_joined_moved_or_made_anew_for_a_token(is_masked: bool) -> None:
    model = tiny_model().eval()
    frozen, memory_len = FrozenModel(model), 300
    ring = frozen.ring(num_rows=2, memory_len=memory_len, chunk_len=10, with_documents=is_masked)
    documents = torch.zeros(2, 10, dtype=torch.int64) if is_masked else None
    for _ in range(40):
        frozen.run(random_tokens(2, 10), ring, document_BT=documents)
    tensors = [*ring.key_values, *([] if ring.documents is None else [ring.documents])]
    places, shapes = [x.data_ptr() for x in tensors], [x.shape for x in tensors]
    tokens_BS = random_tokens(2, 1000)
    for start in range(1000):
        document_BT = None if documents is None else documents[:, :1]
        if start in (0, 500, 999):
            with LargestResult() as seen:
                frozen.run(tokens_BS[:, start : start + 1], ring, document_BT=document_BT)
            assert not any(word in name for name in seen.names for word in ("cat", "stack", "roll", "index_select"))
            # Scores of 2 rows and 2 heads, twice; keys and values of a layer would be five times as much.
            assert seen.num_elements <= 2 * 2 * 2 * (memory_len + 10)
        else:
            frozen.run(tokens_BS[:, start : start + 1], ring, document_BT=document_BT)
    now = [*ring.key_values, *([] if ring.documents is None else [ring.documents])]
    assert [x.data_ptr() for x in now] == places
    assert [x.shape for x in now] == shapes


@torch.no_grad()
def test_a_memory_longer_than_any_before_may_be_asked_for_and_a_shorter_one_after_it() -> None:
    model = tiny_model(dtype=torch.float64).eval()
    frozen, tokens_BS = FrozenModel(model), random_tokens(1, 60)
    for memory_len in (5, 50, 8):
        ring, memory = frozen.ring(num_rows=1, memory_len=memory_len, chunk_len=4), None
        memory = model.empty_memory(num_lanes=1, memory_len=memory_len)
        for start in range(0, 60, 4):
            expected, memory = model(tokens_BS[:, start : start + 4], memory)
            hidden = frozen.run(tokens_BS[:, start : start + 4], ring)
            assert (hidden - expected).abs().max() <= TOLERANCE[torch.float64]


def test_with_memory_enough_no_cut_changes_a_loss() -> None:
    model = tiny_model().eval()
    frozen, tokens_BS = FrozenModel(model), random_tokens(2, 301)
    losses = []
    for chunk_len in (300, 64, 7, 1):
        ring = frozen.ring(num_rows=2, memory_len=300, chunk_len=chunk_len)
        parts = [
            frozen.losses(frozen.run(tokens_BT, ring), targets_BT)
            for tokens_BT, targets_BT in zip(
                tokens_BS[:, :-1].split(chunk_len, dim=1), tokens_BS[:, 1:].split(chunk_len, dim=1), strict=True
            )
        ]
        losses.append(torch.cat(parts, dim=1))
    for one, other in itertools.combinations(losses, 2):
        assert (one - other).abs().max() <= 1e-5


@pytest.mark.parametrize("cutoffs", [[], [10, 25]])
def test_no_more_logits_than_there_is_room_for_are_made_at_a_time(
    monkeypatch: pytest.MonkeyPatch, cutoffs: list[int]
) -> None:
    """However many rows there are; and the losses are those of all at once."""
    model = tiny_model(cutoffs=cutoffs).eval()
    hidden_BTD, targets_BT = torch.randn(16, 5, model.section.width), random_tokens(16, 5, seed=1)
    with torch.inference_mode():
        expected = model.softmax.losses(hidden_BTD, targets_BT)
    made: list[int] = []
    plain = model.softmax.losses

    def counted(hidden_BTD: Tensor, targets_BT: Tensor, **rest: Any) -> Tensor:
        made.append(targets_BT.numel() * VOCAB_SIZE)
        return plain(hidden_BTD, targets_BT, **rest)

    monkeypatch.setattr(model.softmax, "losses", counted)
    for room in (7 * VOCAB_SIZE, 1):
        monkeypatch.setattr("txl_dist.inference.kv_cache.MOST_LOGITS", room)
        found = FrozenModel(model).losses(hidden_BTD, targets_BT)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        assert max(made) <= max(room, VOCAB_SIZE)
        assert sum(made) == 80 * VOCAB_SIZE
        made.clear()


def test_a_model_whose_positions_know_no_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="absolute positions has no memory"):
        FrozenModel(tiny_model(**POSITIONS["absolute"]).eval())


def test_ids_of_the_tiny_vocabulary_have_a_distribution() -> None:
    model = tiny_model(cutoffs=(5, 20), div_value=2).eval()
    frozen = FrozenModel(model)
    hidden_BTD = frozen.run(random_tokens(2, 3), frozen.ring(num_rows=2, memory_len=4, chunk_len=3))
    log_p_SV = frozen.log_probabilities(hidden_BTD.flatten(0, 1))
    assert log_p_SV.shape == (6, VOCAB_SIZE)
    assert (log_p_SV.exp().sum(1) - 1).abs().max() <= 1e-6


class _TransposedKeys(TorchDispatchMode):
    """Counts the products of queries and keys whose keys are read across the rows of the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.num_products = 0
        self.num_transposed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.baddbmm.default:
            self.num_products += 1
            key = max(args[1:], key=Tensor.numel)
            self.num_transposed += key.stride(-1) != 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", RECURRENT)
def test_single_tokens_in_bf16_read_keys_by_rows_and_give_the_losses_of_fp32(name: str) -> None:
    """torch copies keys in bf16 before a product on a CPU, and copies them slowly if they are transposed."""
    model = tiny_model(dtype=torch.bfloat16, **RECURRENT[name]).eval()
    tokens_BS = random_tokens(2, 40)
    losses = []
    for dtype in (torch.bfloat16, torch.float32):
        frozen = FrozenModel(model.to(dtype))
        ring = frozen.ring(num_rows=2, memory_len=12)
        nlls = []
        with _TransposedKeys() as products:
            for position in range(39):
                hidden_B1D = frozen.run(tokens_BS[:, position : position + 1], ring)
                nlls.append(frozen.losses(hidden_B1D, tokens_BS[:, position + 1 : position + 2]))
        assert products.num_products == 39 * model.section.num_layers
        if dtype == torch.bfloat16:
            assert products.num_transposed == 0
        losses.append(torch.cat(nlls, dim=1))
    largest = float(losses[1].max())
    assert (losses[0] - losses[1]).abs().max() <= PROBE_TOLERANCE["bf16"] * max(5.0, largest)
