"""XLNet: two streams in any order agree with Hugging Face's numbers and with loops, and reveal no target."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from tests.helpers.xlnet import first_memory, golden_model, levels_of, order_of, read_golden, section_of
from txl_dist.convert.xlnet import to_xlnet
from txl_dist.errors import ConfigError
from txl_dist.model.attention import implementation
from txl_dist.model.memory import Memory
from txl_dist.model.prediction_order import PredictionOrder
from txl_dist.model.relative_attention import Terms
from txl_dist.model.transformer_xl import Batch, SegmentLoss, TransformerXL

Kernel = Literal["plain", "fused"]
KERNELS: tuple[Kernel, ...] = ("plain", "fused")


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return float((found.detach() - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", ["permutation", "typed", "left_to_right", "causal"])
def test_losses_memories_and_gradients_are_those_of_hugging_face(case: str, kernel: Kernel) -> None:
    golden = read_golden(case)
    model = golden_model(attention=kernel, segment_terms=case == "typed").train()
    memory = first_memory(model, golden, like=model.embedding.weight(0))
    total = torch.zeros(())
    for segment in range(golden.num_segments):
        labels = golden.of("labels", segment)
        is_scored = labels >= 0
        order = None
        if case != "causal":
            order = order_of(golden, segment, with_types=case == "typed")
        batch = Batch(golden.of("input_ids", segment), labels.clamp(min=0), is_scored.float(), None, order=order)
        loss, memory = SegmentLoss(model)(batch, memory, normalizer=float(is_scored.sum()))
        assert relative(loss, golden.of("loss", segment)) < 1e-5
        for layer, hidden in enumerate(memory.hidden):
            expected = golden.tensors[f"mems.{segment}.{layer}"].transpose(0, 1)
            assert relative(hidden[:, -expected.shape[1] :], expected) < 1e-5
        total = total + loss
    total.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients = {
        name: torch.zeros_like(dict(model.named_parameters())[name]) if gradient is None else gradient
        for name, gradient in gradients.items()
    }
    found = to_xlnet(gradients, model.section)
    for name, tensor in found.items():
        expected = golden.tensors[f"grad.{name}"]
        if name.endswith(("r_s_bias", "seg_embed")) and case != "typed":
            continue
        if float(expected.abs().max()) == 0.0:
            assert float(tensor.abs().max()) == 0.0, name
        else:
            assert relative(tensor, expected) < 1e-4, name


@pytest.mark.parametrize("kernel", KERNELS)
def test_both_streams_are_those_of_hugging_face_in_every_layer(kernel: Kernel) -> None:
    golden = read_golden("permutation")
    model = golden_model(attention=kernel).eval()
    inputs: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    model.final_norm.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    memory = first_memory(model, golden, like=model.embedding.weight(0))
    for segment in (0, 1):
        inputs.clear()
        _, memory = model(golden.of("input_ids", segment), memory, order=order_of(golden, segment))
    num_tokens = golden.of("input_ids", 1).shape[1]
    for layer in range(model.section.num_layers):
        assert relative(inputs[layer][:, :num_tokens], golden.tensors[f"states.1.h.{layer}"]) < 1e-5
        assert relative(inputs[layer][:, num_tokens:], golden.tensors[f"states.1.g.{layer}"]) < 1e-5
    assert relative(inputs[-1], golden.tensors[f"states.1.g.{model.section.num_layers}"]) < 1e-5


def small_model(*, seed: int = 1, **settings: object) -> TransformerXL:
    """A model in fp64 whose attention is far from uniform."""
    torch.manual_seed(seed)
    section = section_of(num_layers=2, width=12, num_heads=2, head_width=6, ff_width=16, **settings)
    attention: Kernel = "plain"
    model = TransformerXL(section, vocab_size=23, attention=attention).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.5)
    return model


def with_kernel(model: TransformerXL, kernel: Kernel) -> TransformerXL:
    """The same weights with another kernel."""
    other = TransformerXL(model.section, vocab_size=model.vocab_size, attention=kernel).to(model.embedding.weight(0))
    other.load_state_dict(model.state_dict())
    return other


def random_order(
    num_lanes: int, num_tokens: int, *, reuse_len: int, num_targets: int, seed: int = 0, with_types: bool = False
) -> PredictionOrder:
    """An order in which each half has targets and open tokens."""
    generator = torch.Generator().manual_seed(seed)
    ranks = []
    for _ in range(num_lanes):
        halves = [torch.randperm(n, generator=generator) for n in (reuse_len, num_tokens - reuse_len)]
        ranks.append(torch.cat(halves))
    order_BT = torch.stack(ranks)
    place_Bm = torch.stack(
        [torch.randperm(num_tokens, generator=generator)[:num_targets].sort().values for _ in range(num_lanes)]
    )
    is_target_BT = torch.zeros(num_lanes, num_tokens, dtype=torch.bool)
    is_target_BT.scatter_(1, place_Bm, True)
    query_BT, key_BT = levels_of(order_BT, is_target_BT, torch.zeros_like(is_target_BT), reuse_len=reuse_len)
    type_BT = None
    if with_types:
        type_BT = torch.randint(0, 3, (num_lanes, num_tokens), generator=generator)
    return PredictionOrder(query_BT, key_BT, place_Bm, reuse_len, type_BT)


def filled_memory(model: TransformerXL, *, num_lanes: int, memory_len: int, seed: int = 3) -> Memory:
    """A memory of random numbers, whose oldest position is empty."""
    torch.manual_seed(seed)
    memory = model.empty_memory(num_lanes=num_lanes, memory_len=memory_len)
    document_BM = torch.zeros_like(memory.document_BM)
    document_BM[:, :1] = -1
    return Memory(tuple(torch.randn_like(hidden) for hidden in memory.hidden), document_BM)


def naive_attention(
    terms: Terms, mask_BQK: Tensor, place_BQ: Tensor, *, same_BQK: Tensor | None, segment: tuple[Tensor, ...]
) -> Tensor:
    """Attention by loops over lanes, rows and keys, from the formulas alone."""
    B, Q, N, H = terms.query_BTNH.shape
    K = terms.key_BKNH.shape[1]
    assert terms.distance_KNH is not None
    P = terms.distance_KNH.shape[0]
    T = P - K + 1
    M = K - T
    out = torch.zeros(B, Q, N, terms.value_BKNH.shape[-1], dtype=terms.query_BTNH.dtype)
    for b in range(B):
        for i in range(Q):
            for n in range(N):
                scores = torch.full((K,), -math.inf, dtype=out.dtype)
                for j in range(K):
                    if not mask_BQK[b, i, j]:
                        continue
                    q = terms.query_BTNH[b, i, n]
                    distance = M + int(place_BQ[b, i]) - j
                    r = terms.distance_KNH[K - 1 - distance, n]
                    assert terms.content_bias_NH is not None
                    assert terms.position_bias_NH is not None
                    score = (q + terms.content_bias_NH[n]) @ terms.key_BKNH[b, j, n]
                    score = score + (q + terms.position_bias_NH[n]) @ r
                    if same_BQK is not None:
                        bias_NH, encoding_2NH = segment
                        score = score + (q + bias_NH[n]) @ encoding_2NH[0 if same_BQK[b, i, j] else 1, n]
                    scores[j] = score / math.sqrt(H)
                out[b, i, n] = scores.softmax(0) @ terms.value_BKNH[b, :, n]
    return out


def naive_forward(model: TransformerXL, tokens_BT: Tensor, memory: Memory, order: PredictionOrder) -> Tensor:
    """Hidden states of the query rows, [B, m, D], by loops."""
    B, T = tokens_BT.shape
    M = memory.memory_len
    K = M + T
    place_BQ = torch.cat([torch.arange(T).expand(B, T), order.place_Bm], dim=1)
    Q = place_BQ.shape[1]
    mask_BQK = torch.zeros(B, Q, K, dtype=torch.bool)
    for b in range(B):
        for i in range(Q):
            place = int(place_BQ[b, i])
            for j in range(K):
                if j < M:
                    mask_BQK[b, i, j] = memory.document_BM[b, j] == 0
                else:
                    is_itself = i < T and j - M == i
                    mask_BQK[b, i, j] = is_itself or order.key_level_BT[b, j - M] < order.query_level_BT[b, place]
    same_BQK = None
    if order.type_BT is not None:
        row_type = torch.cat([order.type_BT, order.type_BT.gather(1, order.place_Bm)], dim=1)
        key_type = torch.cat([torch.zeros(B, M, dtype=torch.int64), order.type_BT], dim=1)
        same_BQK = row_type[:, :, None] == key_type[:, None]
    width = model.section.width
    distances = torch.arange(K - 1, -T, -1, dtype=torch.float64)
    frequencies = 1 / 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = distances[:, None] * frequencies
    encoding_PD = torch.cat([angles.sin(), angles.cos()], dim=1)
    assert model.target_row is not None
    rows = model.target_row.expand(B, order.place_Bm.shape[1], width)
    hidden = torch.cat([model.embedding(tokens_BT), rows], dim=1)
    for block, past in zip(model.blocks, memory.hidden, strict=True):
        attention = block.attention
        keys = torch.cat([past, hidden[:, :T]], dim=1)
        heads = (attention.num_heads, attention.head_width)
        key, value = attention.key_value(keys).unflatten(-1, (2, *heads)).unbind(2)
        terms = Terms(
            attention.query(hidden).unflatten(-1, heads),
            key,
            value,
            (encoding_PD @ attention.distance.weight.t()).unflatten(-1, heads),
            attention.content_bias,
            attention.position_bias,
        )
        segment = (attention.segment_bias, attention.segment_encoding)
        context = naive_attention(terms, mask_BQK, place_BQ, same_BQK=same_BQK, segment=segment)
        hidden = block.finish(hidden, attention.output(context.flatten(2)))
    return hidden[:, T:]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("with_types", [False, True])
def test_query_rows_agree_with_loops_over_rows_and_keys(kernel: Kernel, *, with_types: bool) -> None:
    model = with_kernel(small_model(segment_terms=with_types), kernel).eval()
    tokens_BT = torch.randint(0, 23, (2, 7), generator=torch.Generator().manual_seed(5))
    order = random_order(2, 7, reuse_len=4, num_targets=3, with_types=with_types)
    memory = filled_memory(model, num_lanes=2, memory_len=5)
    with torch.no_grad():
        found, _ = model(tokens_BT, memory, order=order)
        expected = naive_forward(model, tokens_BT, memory, order)
    assert float((found - expected).abs().max()) < 1e-9


@pytest.mark.parametrize("with_types", [False, True])
@pytest.mark.parametrize("clamp_len", [0, 9])
def test_fused_attention_agrees_with_plain_attention_over_several_blocks(*, with_types: bool, clamp_len: int) -> None:
    plain = small_model(segment_terms=with_types, clamp_len=clamp_len)
    fused = with_kernel(plain, "fused")
    tokens_BT = torch.randint(0, 23, (2, 150), generator=torch.Generator().manual_seed(5))
    order = random_order(2, 150, reuse_len=70, num_targets=25, with_types=with_types)
    memory = filled_memory(plain, num_lanes=2, memory_len=33)
    results = []
    for model in (plain, fused):
        hidden, after = model(tokens_BT, memory, order=order)
        weights = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)
        (hidden * weights).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        results.append([hidden.detach(), *after.hidden, *gradients])
    assert len(results[0]) == len(results[1])
    for one, other in zip(*results, strict=True):
        assert relative(other, one) < 1e-12


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_prediction_depends_on_each_token_that_it_sees_and_on_no_other(kernel: Kernel) -> None:
    """Otherwise a model could learn to copy its targets."""
    model = with_kernel(small_model(seed=2), kernel).eval()
    num_tokens, reuse_len = 9, 5
    tokens_BT = torch.randint(0, 23, (1, num_tokens), generator=torch.Generator().manual_seed(6))
    order = random_order(1, num_tokens, reuse_len=reuse_len, num_targets=5, seed=4)
    memory = filled_memory(model, num_lanes=1, memory_len=3)
    embedded: list[Tensor] = []

    def keep(_: object, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        leaf = arguments[0].detach().requires_grad_()
        embedded.append(leaf)
        return (leaf, *arguments[1:])

    model.blocks[0].register_forward_pre_hook(keep)
    hidden, after = model(tokens_BT, memory, order=order)
    log_p = model.softmax(hidden, None)
    # One layer deep, a row sees what its level says. Through content rows it sees what these see.
    seen = (order.key_level_BT[0][None] < order.query_level_BT[0][:, None]) | torch.eye(num_tokens, dtype=torch.bool)
    for row, place in enumerate(order.place_Bm[0].tolist()):
        direct = order.key_level_BT[0] < order.query_level_BT[0, place]
        reached = direct | (seen[direct].any(dim=0) if bool(direct.any()) else direct)
        assert not bool(reached[place])
        for token in range(0, 23, 7):
            (gradient,) = torch.autograd.grad(log_p[row, token], embedded[0], retain_graph=True)
            influence = gradient[0, :num_tokens].abs().amax(dim=1)
            assert bool((influence[~reached] == 0).all())
            assert bool((influence[reached] > 0).all())
    for layer, stored in enumerate(after.hidden):
        assert not stored.requires_grad, layer


def test_the_stored_memory_is_bitwise_the_same_for_any_tokens_after_it() -> None:
    model = small_model(seed=3).eval()
    order = random_order(2, 10, reuse_len=6, num_targets=4, seed=1)
    memory = filled_memory(model, num_lanes=2, memory_len=4)
    generator = torch.Generator().manual_seed(7)
    tokens_BT = torch.randint(0, 23, (2, 10), generator=generator)
    _, first = model(tokens_BT, memory, order=order)
    tokens_BT[:, 6:] = torch.randint(0, 23, (2, 4), generator=generator)
    _, second = model(tokens_BT, memory, order=order)
    for one, other in zip(first.hidden, second.hidden, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(first.document_BM, second.document_BM)


@pytest.mark.parametrize("kernel", KERNELS)
def test_with_causal_levels_the_content_rows_are_those_of_a_causal_model(kernel: Kernel) -> None:
    model = with_kernel(small_model(seed=4), kernel).eval()
    tokens_BT = torch.randint(0, 23, (2, 8), generator=torch.Generator().manual_seed(8))
    level_BT = torch.arange(8).expand(2, 8)
    order = PredictionOrder(level_BT + 1, level_BT, torch.tensor([[2], [5]]), 8)
    memory = filled_memory(model, num_lanes=2, memory_len=5)
    outputs: list[Tensor] = []
    model.blocks[-1].register_forward_hook(lambda _, __, result: outputs.append(result[0]))
    with torch.no_grad():
        causal, causal_memory = model(tokens_BT, memory)
        _, ordered_memory = model(tokens_BT, memory, order=order)
    assert float((outputs[1][:, :8] - causal).abs().max()) < 1e-12
    for one, other in zip(causal_memory.hidden, ordered_memory.hidden, strict=True):
        assert float((one - other).abs().max()) < 1e-12


@pytest.mark.parametrize("kernel", KERNELS)
def test_three_segments_are_one_long_segment_with_levels_by_segment(kernel: Kernel) -> None:
    model = with_kernel(small_model(seed=5), kernel).eval()
    tokens_BT = torch.randint(0, 23, (2, 18), generator=torch.Generator().manual_seed(9))
    memory = model.empty_memory(num_lanes=2, memory_len=12)
    orders = [random_order(2, 6, reuse_len=6, num_targets=2, seed=seed) for seed in range(3)]
    step = 9
    whole = PredictionOrder(
        torch.cat([order.query_level_BT + step * index for index, order in enumerate(orders)], dim=1),
        torch.cat([order.key_level_BT + step * index for index, order in enumerate(orders)], dim=1),
        torch.cat([order.place_Bm + 6 * index for index, order in enumerate(orders)], dim=1),
        18,
    )
    with torch.no_grad():
        expected, _ = model(tokens_BT, memory, order=whole)
        parts = []
        for index, order in enumerate(orders):
            hidden, memory = model(tokens_BT[:, 6 * index : 6 * index + 6], memory, order=order)
            parts.append(hidden)
    assert float((torch.cat(parts, dim=1) - expected).abs().max()) < 1e-12


def test_layers_that_remember_less_see_the_same_as_with_a_shorter_memory() -> None:
    section = section_of(num_layers=2, width=12, num_heads=2, head_width=6, ff_width=16)
    torch.manual_seed(6)
    model = TransformerXL(section, vocab_size=23, attention="fused", memory_lens=(2, 6)).double().eval()
    plain = TransformerXL(section, vocab_size=23, attention="plain", memory_lens=(2, 6)).double().eval()
    plain.load_state_dict(model.state_dict())
    tokens_BT = torch.randint(0, 23, (2, 70), generator=torch.Generator().manual_seed(9))
    order = random_order(2, 70, reuse_len=40, num_targets=9)
    memory = filled_memory(model, num_lanes=2, memory_len=6)
    with torch.no_grad():
        one, _ = model(tokens_BT, memory, order=order)
        other, _ = plain(tokens_BT, memory, order=order)
    assert float((one - other).abs().max()) < 1e-12


def test_triton_is_refused_with_the_reason_and_auto_takes_the_fused_path() -> None:
    numbers = torch.zeros(1, 4, 2, 16)
    terms = Terms(numbers, numbers, numbers, torch.zeros(7, 2, 16), torch.zeros(2, 16), torch.zeros(2, 16))
    with pytest.raises(
        ConfigError, match=r"causal attention only.*model\.any_order.*Set engine\.attention to \"auto\" or \"fused\""
    ):
        implementation("triton", terms, in_any_order=True)
    assert implementation("auto", terms, in_any_order=True) is implementation("fused", terms)


def test_an_order_for_a_causal_model_is_refused() -> None:
    model = small_model(any_order=False)
    order = random_order(1, 4, reuse_len=4, num_targets=1)
    with pytest.raises(ConfigError, match=r"Set model\.any_order to true"):
        model(torch.zeros(1, 4, dtype=torch.int64), model.empty_memory(num_lanes=1, memory_len=0), order=order)
