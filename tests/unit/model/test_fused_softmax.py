"""The weighted sum of losses with its gradients in one pass, compared with autograd on the plain losses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.models import VOCAB_SIZE, random_tokens, tiny_model
from tests.helpers.waits import Waits
from tests.unit.model.test_adaptive_softmax import VARIANTS, given_partition, hidden_states
from txl_dist.config.schema import AttentionKernel, ModelSection
from txl_dist.model import fused_softmax
from txl_dist.model.adaptive_embedding import Partition
from txl_dist.model.adaptive_softmax import AdaptiveSoftmax
from txl_dist.model.transformer_xl import TransformerXL

LANES, SEGMENT_LEN = 3, 7
NUM_TOKENS = LANES * SEGMENT_LEN


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """What is read before it was written is NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[1, 4, 64])
def chunk_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tokens in a chunk: one; few, so that clusters end inside a chunk; all."""
    monkeypatch.setitem(fused_softmax.CHUNK_ROWS, "cpu", request.param)
    monkeypatch.setitem(fused_softmax.CHUNK_LOGITS, "cpu", 1)
    return int(request.param)


def weights(dtype: torch.dtype = torch.float64) -> Tensor:
    """As unequal as they come, some zero."""
    drawn = torch.rand(LANES, SEGMENT_LEN, generator=torch.Generator().manual_seed(5))
    return drawn.masked_fill(drawn < 0.3, 0.0).to(dtype)


def targets(softmax: AdaptiveSoftmax, *, multiple: int = 8) -> tuple[Tensor, Partition | None]:
    """Targets, one of them alone in its cluster, and their partition."""
    edge = softmax.edges[-2] if softmax.num_tails else VOCAB_SIZE
    drawn = random_tokens(LANES, SEGMENT_LEN, seed=2) % edge
    drawn[1, 3] = VOCAB_SIZE - 1
    partition = given_partition(drawn, edges=softmax.edges, multiple=multiple) if softmax.num_tails else None
    return drawn, partition


def gradients(loss: Tensor, hidden_BTD: Tensor, softmax: nn.Module) -> dict[str, Tensor]:
    """Of everything, by name."""
    named = {"hidden": hidden_BTD, **dict(softmax.named_parameters())}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def both(
    softmax: AdaptiveSoftmax, *, dtype: torch.dtype, rounded_to: torch.dtype | None = None, factor: float = 1.0
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Loss and gradients, plain and fused, for hidden states that another type may have rounded."""
    targets_BT, partition = targets(softmax)
    weight_BT = weights(torch.promote_types(dtype, torch.float32))
    drawn_BTD = hidden_states(LANES, SEGMENT_LEN, softmax_width(softmax)).to(rounded_to or dtype).to(dtype)
    results = []
    for fused in (False, True):
        hidden_BTD = drawn_BTD.clone().requires_grad_()
        if fused:
            loss = softmax(hidden_BTD, targets_BT, partition=partition, weight_BT=weight_BT)
        else:
            loss = (softmax(hidden_BTD, targets_BT, partition=partition) * weight_BT).sum()
        results.append((loss.detach(), gradients(loss * factor, hidden_BTD, softmax)))
    return results


def softmax_width(softmax: AdaptiveSoftmax) -> int:
    """Of the hidden states."""
    projection, weight = softmax.projection_0, softmax.weight_0
    return int(weight.shape[1] if projection is None else projection.shape[0])


@pytest.mark.usefixtures("chunk_rows")
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_every_gradient_are_those_of_the_plain_losses(name: str) -> None:
    softmax = tiny_model(dtype=torch.float64, **VARIANTS[name]).softmax
    (plain_loss, plain), (fused_loss, fused) = both(softmax, dtype=torch.float64, factor=3.0)
    assert (fused_loss - plain_loss).abs() <= 1e-12
    for key, expected in plain.items():
        assert (fused[key] - expected).abs().max() <= 1e-12, key
        assert expected.abs().max() > 1e-4, key


@pytest.mark.parametrize("name", ["plain", "div_1", "div_2_tied_projections"])
def test_a_tied_tensor_gets_the_sum_of_both_its_gradients(name: str) -> None:
    model = tiny_model(dtype=torch.float64, **VARIANTS[name])
    tokens_BT, (targets_BT, partition) = random_tokens(LANES, SEGMENT_LEN, seed=1), targets(model.softmax)
    results = []
    for weight_BT in (None, weights()):
        model.zero_grad()
        result = model.softmax(model.embedding(tokens_BT), targets_BT, partition=partition, weight_BT=weight_BT)
        (result if weight_BT is not None else (result * weights()).sum()).backward()
        results.append([p.grad for m in (model.embedding, model.softmax) for p in m.parameters()])
    for plain, fused in zip(*results, strict=True):
        assert plain is not None
        assert (fused - plain).abs().max() <= 1e-12


def test_a_token_without_weight_and_a_padded_row_change_nothing() -> None:
    softmax = tiny_model(dtype=torch.float64, **VARIANTS["div_1"]).softmax
    hidden_BTD = hidden_states(LANES, SEGMENT_LEN, 12)
    targets_BT, _ = targets(softmax)
    weight_BT = weights()
    weight_BT[-1, -1] = 0.0  # the last token is the one that padded rows read
    found = []
    for multiple, last in ((1, 0.0), (16, 0.0), (16, 1e3)):
        mine = hidden_BTD.clone()
        mine[-1, -1] += last
        mine.requires_grad_()
        loss = softmax(mine, targets_BT, partition=targets(softmax, multiple=multiple)[1], weight_BT=weight_BT)
        found.append((loss.detach(), gradients(loss, mine, softmax)))
    for loss, other in found[1:]:
        assert (loss - found[0][0]).abs() <= 1e-12
        assert all((other[key] - expected).abs().max() <= 1e-12 for key, expected in found[0][1].items())


def test_weights_that_are_all_zero_give_zeros() -> None:
    softmax = tiny_model(**VARIANTS["div_1"]).softmax
    hidden_BTD = hidden_states(LANES, SEGMENT_LEN, 12, dtype=torch.float32).requires_grad_()
    targets_BT, partition = targets(softmax)
    loss = softmax(hidden_BTD, targets_BT, partition=partition, weight_BT=torch.zeros(LANES, SEGMENT_LEN))
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients(loss, hidden_BTD, softmax).values())


@pytest.mark.usefixtures("chunk_rows")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["plain", "div_1", "div_2"])
def test_in_half_precision_gradients_are_as_close_to_the_true_ones_as_autograds(name: str, dtype: torch.dtype) -> None:
    softmax = tiny_model(dtype=dtype, **VARIANTS[name]).softmax
    (plain_loss, plain), (fused_loss, fused) = both(softmax, dtype=dtype)
    exact = tiny_model(dtype=dtype, **VARIANTS[name]).double().softmax
    _, (_, true) = both(exact, dtype=torch.float64, rounded_to=dtype)
    assert fused_loss.dtype == torch.float32
    assert (fused_loss - plain_loss).abs() <= 1e-4
    for key, expected in true.items():
        assert fused[key].dtype == dtype
        error, autograds = ((found[key].double() - expected).norm() / expected.norm() for found in (fused, plain))
        assert error <= max(1.5 * autograds, 1.5 * torch.finfo(dtype).eps), key


def test_in_half_precision_many_chunks_add_up_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    softmax = tiny_model(dtype=torch.bfloat16).softmax
    hidden_BTD = hidden_states(8, 64, 12).bfloat16().requires_grad_()
    targets_BT, weight_BT = random_tokens(8, 64), torch.ones(8, 64)
    monkeypatch.setitem(fused_softmax.CHUNK_LOGITS, "cpu", 1)
    found = []
    for rows in (512, 1):
        monkeypatch.setitem(fused_softmax.CHUNK_ROWS, "cpu", rows)
        found.append(gradients(softmax(hidden_BTD, targets_BT, weight_BT=weight_BT), hidden_BTD, softmax))
    for key, expected in found[0].items():
        assert (found[1][key] - expected).norm() <= torch.finfo(torch.bfloat16).eps * expected.norm(), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_become_gradients_in_pieces_as_they_do_at_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    softmax = tiny_model(dtype=dtype, **VARIANTS["div_2"]).softmax
    _, (loss, at_once) = both(softmax, dtype=dtype)
    monkeypatch.setitem(fused_softmax.CACHED_LOGITS, "cpu", 1)  # a token at a time
    _, (loss_of_pieces, in_pieces) = both(softmax, dtype=dtype)
    torch.testing.assert_close(loss_of_pieces, loss)
    for key, expected in at_once.items():
        torch.testing.assert_close(in_pieces[key], expected, msg=key)


def test_small_weights_leave_no_gradient_to_vanish_in_fp16() -> None:
    softmax = tiny_model(dtype=torch.float16, **VARIANTS["div_1"]).softmax
    hidden_BTD = hidden_states(LANES, SEGMENT_LEN, 12, dtype=torch.float16).requires_grad_()
    targets_BT, partition = targets(softmax)
    found = []
    for normalizer in (1.0, 2.0**20):  # beyond fp16's smallest number, and undone by the loss scale
        loss = softmax(hidden_BTD, targets_BT, partition=partition, weight_BT=weights(torch.float32) / normalizer)
        found.append(gradients(loss * normalizer, hidden_BTD, softmax))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_nothing_is_made_for_what_needs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    softmax = tiny_model(**VARIANTS["div_2"]).softmax
    hidden_BTD = hidden_states(LANES, SEGMENT_LEN, 12, dtype=torch.float32)
    targets_BT, partition = targets(softmax)
    softmax.weight_0.requires_grad_(False)
    loss = softmax(hidden_BTD, targets_BT, partition=partition, weight_BT=weights(torch.float32))
    with_gradient = [saved for saved in loss.grad_fn.saved_tensors if saved is not None]
    assert len(with_gradient) == len(list(softmax.parameters())) - 1  # all but one table, and no hidden states
    loss.backward()
    assert softmax.weight_0.grad is None

    called = []
    monkeypatch.setattr(fused_softmax._WeightedLoss, "apply", lambda *_: called.append(True))
    with torch.no_grad():
        again = softmax(hidden_BTD, targets_BT, partition=partition, weight_BT=weights(torch.float32))
    assert not called
    assert (again - loss).abs() <= 1e-5


def test_a_second_backward_is_refused() -> None:
    softmax = tiny_model(**VARIANTS["div_1"]).softmax
    targets_BT, partition = targets(softmax)
    hidden_BTD = hidden_states(LANES, SEGMENT_LEN, 12, dtype=torch.float32)
    loss = softmax(hidden_BTD, targets_BT, partition=partition, weight_BT=weights(torch.float32))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="freed by"):
        loss.backward()


@pytest.mark.parametrize("name", ["plain", "div_1", "div_2"])
def test_nothing_waits_for_the_device(name: str) -> None:
    model = tiny_model(**VARIANTS[name])
    tokens_BT, (targets_BT, partition) = random_tokens(LANES, SEGMENT_LEN), targets(model.softmax)
    of_tokens = given_partition(tokens_BT, edges=model.embedding.edges)
    with Waits() as waits:
        hidden_BTD = model.embedding(tokens_BT, partition=of_tokens)
        model.softmax(hidden_BTD, targets_BT, partition=partition, weight_BT=weights(torch.float32)).backward()
    assert waits.num_operations > 20
    assert waits.places == []


@pytest.mark.parametrize("name", ["plain", "div_1", "div_2", "div_4"])
def test_executed_products_are_those_of_the_formula(name: str) -> None:
    softmax = tiny_model(**VARIANTS[name]).softmax
    targets_BT, partition = targets(softmax, multiple=1)
    hidden_BTD = hidden_states(LANES, SEGMENT_LEN, 12, dtype=torch.float32).requires_grad_()
    expected = 0
    for i in range(softmax.num_tails + 1):
        num_rows = len(partition[i].rows) if partition is not None and i > 0 else NUM_TOKENS
        words = softmax.edges[i + 1] - softmax.edges[i] + (softmax.num_tails if i == 0 else 0)
        width = softmax.weight_0.shape[1] if softmax.one_table else getattr(softmax, f"weight_{i}").shape[1]
        has_projection = getattr(softmax, f"projection_{i}") is not None
        expected += num_rows * width * (words + (12 if has_projection else 0)) * 6
    with FlopCounterMode(display=False) as counter:
        softmax(hidden_BTD, targets_BT, partition=partition, weight_BT=weights(torch.float32)).backward()
    assert counter.get_total_flops() == expected


def test_what_is_kept_for_the_backward_are_gradients_and_no_logits() -> None:
    section = ModelSection.model_validate({"num_layers": 1, "width": 8, "num_heads": 1, "head_width": 8, "ff_width": 8})
    model = TransformerXL(section, vocab_size=300)
    hidden_BTD = hidden_states(8, 64, 8, dtype=torch.float32).requires_grad_()
    targets_BT = random_tokens(8, 64)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        model.softmax(hidden_BTD, targets_BT, weight_BT=torch.ones(8, 64))
    parameters = sum(parameter.numel() for parameter in model.softmax.parameters())
    assert sum(kept) <= hidden_BTD.numel() + parameters + 1 < 512 * 300


@pytest.mark.parametrize(
    ("attention", "is_launched"), [("auto", True), ("triton", True), ("plain", False), ("fused", False)]
)
def test_the_triton_kernel_runs_only_where_the_setting_for_attention_allows_triton(
    attention: AttentionKernel, is_launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []

    def kernel(logits_cV: Tensor, bias: Tensor, targets_c: Tensor, share_c: Tensor) -> Tensor:
        launched.append(True)
        return torch.zeros_like(share_c)

    monkeypatch.setattr(fused_softmax, "runs_kernel", lambda hidden_SD: True)
    monkeypatch.setattr(fused_softmax, "_into_gradient_by_kernel", kernel)
    section = tiny_model().section
    softmax = TransformerXL(section, vocab_size=VOCAB_SIZE, attention=attention).softmax
    hidden_BTD, targets_BT = torch.zeros(2, 3, section.width), torch.zeros(2, 3, dtype=torch.int64)
    softmax(hidden_BTD, targets_BT, weight_BT=torch.ones(2, 3))
    assert bool(launched) == is_launched
