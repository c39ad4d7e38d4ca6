"""Results of the other codes, computed by our model from their own files after `txl import`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers.peers import (
    HUGGING_FACE,
    LABML,
    ORIGINAL,
    read_golden,
    read_huggingface,
    state_dict,
    write_nvidia_checkpoint,
    write_original_module,
    write_settings,
)
from txl_dist.convert.import_checks import only_tensors
from txl_dist.convert.importer import import_model
from txl_dist.convert.key_mapping import from_original
from txl_dist.inference.bundle import Bundle, load_bundle
from txl_dist.inference.probe import log_probabilities
from txl_dist.model.memory import Memory, attended

FORMS = ["module", "legacy_module", "state_dict"]


def import_original(folder: Path, name: str, form: str) -> tuple[Bundle, dict[str, Tensor]]:
    """(the bundle that `txl import` makes of a golden file's weights, the golden tensors)."""
    settings, golden = read_golden(name)
    weights = state_dict(golden)
    settings_file = None
    if form == "state_dict":
        torch.save(weights, folder / "model.pt")
        settings_file = write_settings(folder / "settings.json", settings)
    else:
        write_original_module(folder / "model.pt", settings, weights, legacy=form == "legacy_module")
    import_model(folder / "model.pt", folder / "bundle", format="original", settings=settings_file)
    return load_bundle(folder / "bundle"), golden


def assert_close(ours: Tensor, golden: Tensor, *, tolerance: float, what: str) -> None:
    """max |a - b| <= tolerance max |b|."""
    assert ours.shape == golden.shape, what
    error = (ours - golden).abs().max().item()
    assert error <= tolerance * golden.abs().max().item(), f"{what}: {error} against {golden.abs().max().item()}"


def assert_reproduced(
    bundle: Bundle, golden: dict[str, Tensor], *, segment_len: int, start: Memory | None = None
) -> None:
    """Losses by the function that scores, memories by the model; golden tensors are time-major."""
    ids_BS, model = golden["ids"].t().contiguous(), bundle.model
    num_segments = (ids_BS.shape[1] - 1) // segment_len
    lengths = {"segment_len": segment_len, "memory_len": bundle.memory_len}
    nll_BS = -log_probabilities(model, ids_BS, **lengths, zero_memory=start is not None)
    memory = start or model.empty_memory(num_lanes=ids_BS.shape[0], memory_len=bundle.memory_len)
    for index in range(num_segments):
        span = slice(index * segment_len, (index + 1) * segment_len)
        assert_close(nll_BS[:, span].t(), golden[f"nll.{index}"], tolerance=1e-5, what=f"losses of segment {index}")
        with torch.no_grad():
            _, memory = model(ids_BS[:, span], memory)
        for layer in range(model.section.num_layers):
            expected = golden.get(f"mems.{index}.{layer}")
            if expected is not None:
                ours = torch.stack(memory.hidden)[layer, :, bundle.memory_len - expected.shape[0] :].transpose(0, 1)
                assert_close(ours, expected, tolerance=1e-5, what=f"memory {layer} after segment {index}")
    assert f"nll.{num_segments}" not in golden


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ORIGINAL)
def test_losses_and_memories_of_the_original_survive_the_import(name: str, form: str, tmp_path: Path) -> None:
    bundle, golden = import_original(tmp_path, name, form)
    assert_reproduced(bundle, golden, segment_len=12)
    assert bundle.segment_len == 12


@pytest.mark.parametrize("name", ORIGINAL)
def test_gradients_of_the_original_survive_the_import(name: str, tmp_path: Path) -> None:
    bundle, golden = import_original(tmp_path, name, "module")
    model = bundle.model.train()
    ids_BS = golden["ids"].t().contiguous()
    memory = model.empty_memory(num_lanes=ids_BS.shape[0], memory_len=bundle.memory_len)
    total = torch.zeros(())
    for start in range(0, ids_BS.shape[1] - 1, 12):
        hidden_BTD, memory = model(ids_BS[:, start : start + 12], memory)
        total = total + model.softmax(hidden_BTD, ids_BS[:, start + 1 : start + 13]).mean()
    total.backward()
    # A gradient has the shape of its weight: the same renaming serves.
    expected = from_original(only_tensors(state_dict(golden, prefix="grad."), where=name), model.section)
    for key, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[key], tolerance=1e-4, what=f"gradient of {key}")


@pytest.mark.parametrize("name", ["wt103_base_like", "wt103_large_like", "lm1b_like", "untied", "shaw_learned"])
def test_the_same_weights_in_a_checkpoint_of_nvidia_give_the_same_losses(name: str, tmp_path: Path) -> None:
    settings, golden = read_golden(name)
    ties = (settings["tie_projs"] * 4)[: len(settings["cutoffs"]) + 1]
    file = write_nvidia_checkpoint(tmp_path / "checkpoint_last.pt", {**settings, "tie_projs": ties}, state_dict(golden))
    import_model(file.parent, tmp_path / "bundle", format="nvidia")
    assert_reproduced(load_bundle(tmp_path / "bundle"), golden, segment_len=12)


def test_the_window_of_nvidia_is_one_key_wider_than_that_of_the_original(tmp_path: Path) -> None:
    settings, golden = read_golden("eval_same_length_clamp")
    file = write_nvidia_checkpoint(tmp_path / "checkpoint_last.pt", settings, state_dict(golden))
    import_model(file, tmp_path / "bundle", format="nvidia")
    assert load_bundle(tmp_path / "bundle").model.section.same_length == "memory_and_self"
    bundle, _ = import_original(tmp_path, "eval_same_length_clamp", "module")
    assert bundle.model.section.same_length == "memory"


@pytest.mark.parametrize("rows", ["past_only", "past_and_future"])
def test_losses_and_memories_of_labml_survive_the_import(rows: str, tmp_path: Path) -> None:
    settings, golden = read_golden(LABML)
    weights = state_dict(golden)
    if rows == "past_and_future":
        # As in labml: rows of the future behind the row of distance 0, which no language model reads.
        tables = {key: value for key, value in weights.items() if "key_pos_" in key}
        weights |= {key: torch.cat([value, torch.full_like(value[:-2], 7.0)]) for key, value in tables.items()}
    torch.save(weights, tmp_path / "model.pth")
    import_model(
        tmp_path / "model.pth",
        tmp_path / "bundle",
        format="labml",
        settings=write_settings(tmp_path / "settings.json", settings),
    )
    bundle = load_bundle(tmp_path / "bundle")
    assert (bundle.segment_len, bundle.memory_len) == (6, 18)
    assert_reproduced(bundle, golden, segment_len=6)


def test_losses_and_memories_of_hugging_face_survive_the_import_with_its_attended_zeros(tmp_path: Path) -> None:
    import_model(HUGGING_FACE, tmp_path / "bundle", format="huggingface", segment_len=12)
    bundle, expected = load_bundle(tmp_path / "bundle"), read_huggingface()
    golden = {"ids": expected["ids"].t(), **{k: v.t() if k.startswith("nll") else v for k, v in expected.items()}}
    golden["ids"] = expected["ids"].t()
    start = attended(bundle.model.empty_memory(num_lanes=3, memory_len=20))
    assert_reproduced(bundle, golden, segment_len=12, start=start)
    with torch.no_grad():
        for position in range(0, 48, 12):
            hidden_BTD, start = bundle.model(expected["ids"][:, position : position + 12], start)
        ours = bundle.model.softmax.log_probabilities(hidden_BTD.flatten(0, 1)).view(3, 12, 1000)
    assert_close(ours, expected["logprobs_last"], tolerance=1e-5, what="log-probabilities of the whole vocabulary")


def test_without_its_attended_zeros_hugging_face_gives_other_numbers(tmp_path: Path) -> None:
    import_model(HUGGING_FACE, tmp_path / "bundle", format="huggingface", segment_len=12)
    bundle, expected = load_bundle(tmp_path / "bundle"), read_huggingface()
    ours = -log_probabilities(bundle.model, expected["ids"], segment_len=12, memory_len=20)
    assert (ours[:, :12] - expected["nll.0"]).abs().max() > 1e-3
