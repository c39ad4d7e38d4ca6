"""Our model reproduces the numbers of the original authors' code."""

import pytest
import torch

from tests.helpers.original import golden_model, our_names, read_golden
from txl_dist.model.transformer_xl import Batch, SegmentLoss

ALL = [
    "enwik8_like",
    "wt103_base_like",
    "wt103_large_like",
    "lm1b_like",
    "embed_projection",
    "untied",
    "pre_norm",
    "eval_same_length_clamp",
]
WITH_CURVE = ["enwik8_like", "wt103_base_like", "wt103_large_like", "pre_norm"]


def assert_close(ours: torch.Tensor, golden: torch.Tensor, *, tolerance: float, what: str) -> None:
    error = (ours - golden).abs().max().item()
    assert error <= tolerance * golden.abs().max().item(), f"{what}: {error} against {golden.abs().max().item()}"


def segment(ids, start, length):
    tokens_TB, targets_TB = ids[start : start + length], ids[start + 1 : start + length + 1]
    return tokens_TB.t().contiguous(), targets_TB.t().contiguous()


@pytest.mark.parametrize("name", ALL)
def test_losses_memories_and_gradients_are_those_of_the_original(name: str) -> None:
    original, golden = read_golden(name)
    model = golden_model(original, golden).eval()
    ids, length, memory_len = golden["ids"], original["tgt_len"], original["mem_len"]
    memory = model.empty_memory(num_lanes=ids.shape[1], memory_len=memory_len)
    total = torch.zeros(())
    for index, start in enumerate(range(0, ids.shape[0] - 1, length)):
        tokens_BT, targets_BT = segment(ids, start, length)
        hidden, memory = model(tokens_BT, memory)
        nll_BT = model.softmax(hidden, targets_BT)
        total = total + nll_BT.mean()
        assert_close(nll_BT.t(), golden[f"nll.{index}"], tolerance=1e-5, what=f"losses of segment {index}")
        for layer in range(original["n_layer"]):
            expected = golden[f"mems.{index}.{layer}"].transpose(0, 1)
            filled = expected.shape[1]
            assert (memory.document_BM >= 0).sum(1).tolist() == [filled] * ids.shape[1]
            ours = memory.hidden_LBMD[layer, :, memory_len - filled :]
            assert_close(ours, expected, tolerance=1e-5, what=f"memory {layer} after segment {index}")
    total.backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    expected = our_names(golden, prefix="grad.", original=original)
    compared = 0
    for key, value in expected.items():
        if key in gradients:
            assert_close(gradients[key], value, tolerance=1e-4, what=f"gradient of {key}")
            compared += 1
    assert compared == len(gradients)


@pytest.mark.parametrize("name", WITH_CURVE)
def test_sixty_steps_of_training_follow_the_curve_of_the_original(name: str) -> None:
    original, golden = read_golden(name)
    model = SegmentLoss(golden_model(original, golden))
    ids, length = golden["train_ids"], original["tgt_len"]
    memory = model.model.empty_memory(num_lanes=ids.shape[1], memory_len=original["mem_len"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step, expected in enumerate(golden["train_loss"]):
        tokens_BT, targets_BT = segment(ids, step * length, length)
        batch = Batch(tokens_BT, targets_BT, torch.ones(tokens_BT.shape), None)
        loss, memory = model(batch, memory, float(tokens_BT.numel()))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-3), f"loss of step {step}"
        assert norm.item() == pytest.approx(golden["train_grad_norm"][step].item(), rel=1e-2), f"norm of step {step}"
