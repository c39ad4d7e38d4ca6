"""Refusals of the importers, with usable remedies, and lossless conversions between formats."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.logs import recorded_log
from tests.helpers.models import VOCAB_SIZE, tiny_model
from tests.helpers.peers import (
    HUGGING_FACE,
    LABML,
    ORIGINAL,
    read_golden,
    state_dict,
    write_nvidia_checkpoint,
    write_original_module,
    write_settings,
)
from txl_dist.convert.huggingface import export_huggingface
from txl_dist.convert.import_checks import read_peer_settings
from txl_dist.convert.importer import READERS, Format, import_model
from txl_dist.convert.original import _div_value
from txl_dist.convert.vocabulary import identity_tokenizer
from txl_dist.errors import CheckpointError, ConfigError, TxlError
from txl_dist.inference.bundle import Package, load_bundle
from txl_dist.inference.language_model import LanguageModel
from txl_dist.model.transformer_xl import TransformerXL

FORMATS: list[Format] = ["original", "nvidia", "huggingface", "labml"]


def peers_file(folder: Path, format: Format) -> tuple[Path, dict[str, Any]]:
    """(a sound file or folder of each format, the arguments that its import needs besides)."""
    settings, golden = read_golden("lm1b_like")
    if format == "original":
        torch.save(state_dict(golden), folder / "model.pt")
        return folder / "model.pt", {"settings": write_settings(folder / "settings.json", settings)}
    if format == "nvidia":
        return write_nvidia_checkpoint(folder / "checkpoint_last.pt", settings, state_dict(golden)), {}
    if format == "huggingface":
        shutil.copytree(HUGGING_FACE, folder / "huggingface")
        return folder / "huggingface", {"segment_len": 12}
    settings, golden = read_golden(LABML)
    torch.save(state_dict(golden), folder / "labml.pth")
    return folder / "labml.pth", {"settings": write_settings(folder / "settings.json", settings)}


def change_weights(path: Path, format: Format, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Apply a change to the state dict inside a file of `peers_file`."""
    file = path / "pytorch_model.bin" if format == "huggingface" else path
    content = torch.load(file, weights_only=False)
    change(content["model_state"] if format == "nvidia" else content)
    torch.save(content, file)


@pytest.mark.parametrize("format", FORMATS)
def test_a_sound_file_is_imported(format: Format, tmp_path: Path) -> None:
    path, arguments = peers_file(tmp_path, format)
    made = import_model(path, tmp_path / "bundle", format=format, **arguments)
    bundle = load_bundle(tmp_path / "bundle")
    assert made.num_parameters == sum(parameter.numel() for parameter in bundle.model.parameters())
    assert bundle.source == {"imported": format, "file": path.name}


@pytest.mark.parametrize("format", FORMATS)
def test_a_missing_key_is_named_with_the_shape_it_should_have(format: Format, tmp_path: Path) -> None:
    path, arguments = peers_file(tmp_path, format)
    name = {
        "huggingface": "transformer.layers.1.pos_ff.CoreNet.0.weight",
        "labml": "transformer.layers.1.feed_forward.layer1.weight",
    }.get(format, "layers.1.pos_ff.CoreNet.0.weight")
    change_weights(path, format, lambda weights: weights.pop(name))
    shown = name.removeprefix("transformer.") if format == "huggingface" else name
    with pytest.raises(CheckpointError, match=rf"{path.name}.*{shown} is missing \(expected \[48, 32\]\)"):
        import_model(path, tmp_path / "bundle", format=format, **arguments)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("format", FORMATS)
def test_a_surplus_key_is_named(format: Format, tmp_path: Path) -> None:
    path, arguments = peers_file(tmp_path, format)
    change_weights(path, format, lambda weights: weights.update({"extra.weight": torch.zeros(2, 3)}))
    with pytest.raises(CheckpointError, match=rf"{path.name}.*extra.weight \[2, 3\] is surplus"):
        import_model(path, tmp_path / "bundle", format=format, **arguments)


@pytest.mark.parametrize("format", FORMATS)
def test_a_wrong_shape_is_named_beside_the_right_one(format: Format, tmp_path: Path) -> None:
    path, arguments = peers_file(tmp_path, format)
    name = {
        "huggingface": "transformer.layers.1.dec_attn.o_net.weight",
        "labml": "transformer.layers.1.self_attn.output.weight",
    }.get(format, "layers.1.dec_attn.o_net.weight")
    change_weights(path, format, lambda weights: weights.update({name: torch.zeros(32, 31)}))
    with pytest.raises(CheckpointError, match=rf"{path.name}.*has shape \[32, 31\], expected \[32, 32\]"):
        import_model(path, tmp_path / "bundle", format=format, **arguments)


def every_key(format: Format, folder: Path) -> tuple[Path, dict[str, Any], list[str]]:
    """(a file, the arguments of its import, the keys that it may not lack)."""
    path, arguments = peers_file(folder, format)
    content = torch.load(path / "pytorch_model.bin" if format == "huggingface" else path, weights_only=False)
    weights = content["model_state"] if format == "nvidia" else content
    ties = [f"crit.out_layers.{i}.weight" for i in range(3)] + ["crit.out_projs.1", "crit.out_projs.2"]
    # What is there twice: Hugging Face's other file format and older checkpoints of NVIDIA lack it.
    skipped = ties if format == "huggingface" else [name for name in weights if "shared_out_projs" in name]
    return path, arguments, [name for name in weights if not name.endswith("inv_freq") and name not in skipped]


@pytest.mark.parametrize("format", FORMATS)
def test_no_key_may_be_missing_or_a_single_number(format: Format, tmp_path: Path) -> None:
    path, arguments, keys = every_key(format, tmp_path)
    file = path / "pytorch_model.bin" if format == "huggingface" else path
    whole = file.read_bytes()
    assert len(keys) > 30
    for name in keys:
        for change in (lambda weights, name=name: weights.pop(name), scalar(name)):
            change_weights(path, format, change)
            with pytest.raises(CheckpointError) as caught:
                READERS[format](path, user_settings=read_peer_settings(arguments.get("settings")))
            assert name.removeprefix("transformer.") in str(caught.value), "the key is named"
            file.write_bytes(whole)


def scalar(name: str) -> Callable[[dict[str, Tensor]], None]:
    """Put a tensor without dimensions in place of another."""
    return lambda weights: weights.update({name: torch.tensor(1.0)})


def test_a_tie_is_not_guessed_from_what_is_missing(tmp_path: Path) -> None:
    _, golden = read_golden("lm1b_like")
    weights = state_dict(golden)
    del weights["crit.out_projs.0"]
    torch.save(weights, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"crit\.out_projs\.0 is missing"):
        import_model(tmp_path / "model.pt", tmp_path / "bundle", format="original", segment_len=8, memory_len=8)


@pytest.mark.parametrize(("settings", "near"), [({"nlayer": 2}, "n_layer"), ({"same_lenght": True}, "same_length")])
def test_a_misspelt_setting_is_refused_and_the_near_one_suggested(
    settings: dict[str, Any], near: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"Did you mean {near}"):
        import_with(tmp_path, "enwik8_like", settings)


def test_settings_that_tell_nothing_are_mentioned_and_left(tmp_path: Path) -> None:
    settings, _ = read_golden("enwik8_like")
    with recorded_log() as lines:
        import_with(tmp_path, "enwik8_like", {**settings, "kept_rows": "all"})
    assert any("kept_rows" in message for _, message in lines)


@pytest.mark.parametrize("lengths", [{"segment_len": -5}, {"memory_len": -7}])
def test_lengths_that_cannot_be_are_refused(lengths: dict[str, int], tmp_path: Path) -> None:
    settings, _ = read_golden("enwik8_like")
    with pytest.raises(ConfigError, match="a length is negative"):
        import_with(tmp_path, "enwik8_like", settings, **lengths)


def test_numbers_too_large_for_the_type_are_named(tmp_path: Path) -> None:
    path, arguments = peers_file(tmp_path, "original")
    change_weights(path, "original", lambda weights: weights["r_w_bias"].fill_(1e5))
    with pytest.raises(CheckpointError, match=r"content_bias.*fp16"):
        import_model(path, tmp_path / "bundle", format="original", dtype="fp16", **arguments)


def test_a_folder_of_nvidia_without_a_last_checkpoint_gives_its_best(tmp_path: Path) -> None:
    path, _ = peers_file(tmp_path, "nvidia")
    path.rename(tmp_path / "checkpoint_best.pt")
    import_model(tmp_path, tmp_path / "bundle", format="nvidia")


@pytest.mark.parametrize("format", FORMATS)
def test_numbers_that_are_not_finite_are_refused(format: Format, tmp_path: Path) -> None:
    path, arguments = peers_file(tmp_path, format)

    def spoil(weights: dict[str, Tensor]) -> None:
        next(iter(weights.values())).view(-1)[0] = float("nan")

    change_weights(path, format, spoil)
    with pytest.raises(CheckpointError, match="not finite"):
        import_model(path, tmp_path / "bundle", format=format, **arguments)


@pytest.mark.parametrize("format", FORMATS)
def test_a_state_dict_of_another_architecture_is_refused(format: Format, tmp_path: Path) -> None:
    path, arguments = peers_file(tmp_path, format)

    def replace(weights: dict[str, Tensor]) -> None:
        weights.clear()
        weights.update({"wte.weight": torch.zeros(50, 8), "h.0.attn.c_attn.weight": torch.zeros(8, 24)})

    change_weights(path, format, replace)
    with pytest.raises(CheckpointError, match=r"wte\.weight"):
        import_model(path, tmp_path / "bundle", format=format, **arguments)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_named(format: Format, share: float, tmp_path: Path) -> None:
    path, arguments = peers_file(tmp_path, format)
    file = path / "pytorch_model.bin" if format == "huggingface" else path
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError, match=file.name):
        import_model(path, tmp_path / "bundle", format=format, **arguments)


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_would_run_code_is_refused_and_nothing_runs(format: Format, tmp_path: Path) -> None:
    path, arguments = peers_file(tmp_path, format)
    marker = tmp_path / "it_ran"

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {marker}",)

    change_weights(path, format, lambda weights: weights.update({"payload": Payload()}))
    with pytest.raises(CheckpointError, match=r"system"):
        import_model(path, tmp_path / "bundle", format=format, **arguments)
    torch.save({"idx2sym": [Payload()], "sym2idx": {}}, tmp_path / "vocab.bin")
    path, arguments = peers_file(tmp_path / "again", format) if (tmp_path / "again").mkdir() is None else (path, {})
    with pytest.raises(TxlError, match=r"system"):
        import_model(path, tmp_path / "bundle", format=format, vocab=tmp_path / "vocab.bin", **arguments)
    assert not marker.exists()


@pytest.mark.parametrize("format", FORMATS)
def test_a_vocabulary_of_another_size_is_refused_with_both_sizes(format: Format, tmp_path: Path) -> None:
    path, arguments = peers_file(tmp_path, format)
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(["<eos>", "<unk>", *(f"w{i}" for i in range(5))]) + "\n", encoding="utf-8")
    with pytest.raises(TxlError, match=r"vocab.txt.*\b7\b.*\b(1,?000|65)\b"):
        import_model(path, tmp_path / "bundle", format=format, vocab=vocab, **arguments)


@pytest.mark.parametrize("format", FORMATS)
def test_a_path_that_does_not_exist_is_named(format: Format, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere\.pt does not exist"):
        import_model(tmp_path / "nowhere.pt", tmp_path / "bundle", format=format)


def import_with(folder: Path, name: str, settings: dict[str, Any], **arguments: Any) -> None:
    _, golden = read_golden(name)
    folder.mkdir(exist_ok=True)
    torch.save(state_dict(golden), folder / "model.pt")
    file = write_settings(folder / "settings.json", settings)
    import_model(folder / "model.pt", folder / "bundle", format="original", settings=file, **arguments)


def test_cutoffs_that_a_single_table_does_not_tell_are_asked_for(tmp_path: Path) -> None:
    settings, _ = read_golden("wt103_base_like")
    without = {key: value for key, value in settings.items() if key != "cutoffs"}
    with pytest.raises(CheckpointError, match=r"cluster_weight has shape \[2, \d+\].*cutoffs.*--settings"):
        import_with(tmp_path, "wt103_base_like", without)


@pytest.mark.parametrize(
    ("name", "cutoffs"), [("wt103_base_like", [100]), ("wt103_large_like", [100, 301]), ("enwik8_like", [100])]
)
def test_wrong_cutoffs_are_refused(name: str, cutoffs: list[int], tmp_path: Path) -> None:
    settings, _ = read_golden(name)
    with pytest.raises(
        CheckpointError, match=r"model.pt does not fit the settings: .*(cluster_weight|emb_layers.1.weight)"
    ):
        import_with(tmp_path, name, {**settings, "cutoffs": cutoffs})


@pytest.mark.parametrize(
    "key", ["n_layer", "n_head", "d_head", "d_model", "d_inner", "d_embed", "n_token", "attn_type"]
)
def test_settings_that_contradict_the_weights_are_refused(key: str, tmp_path: Path) -> None:
    settings, _ = read_golden("lm1b_like")
    expected = {"n_layer": r"layers\.2\..* is missing", "attn_type": "r_emb is missing"}
    with pytest.raises(CheckpointError, match=expected.get(key, r"has shape \[.*\], expected \[")):
        import_with(tmp_path, "lm1b_like", {**settings, key: settings[key] + 1})


def test_ties_that_the_weights_do_not_show_are_refused(tmp_path: Path) -> None:
    settings, _ = read_golden("untied")
    with pytest.raises(CheckpointError, match=r"crit.out_layers.0.weight differs from word_emb.emb_layers.0.weight"):
        import_with(tmp_path, "untied", {**settings, "tie_weight": True})


def test_ties_are_found_where_nobody_tells_them(tmp_path: Path) -> None:
    for name in ("untied", "wt103_large_like", "embed_projection"):
        settings, _ = read_golden(name)
        silent = {key: value for key, value in settings.items() if key not in ("tie_weight", "tie_projs")}
        import_with(tmp_path, name, silent)
        found = load_bundle(tmp_path / "bundle").model.section
        import_with(tmp_path, name, settings)
        assert load_bundle(tmp_path / "bundle").model.section == found
        shutil.rmtree(tmp_path / "bundle")


def test_heads_of_absolute_attention_are_asked_for(tmp_path: Path) -> None:
    settings, _ = read_golden("absolute_vanilla")
    without = {key: value for key, value in settings.items() if key != "n_head"}
    with pytest.raises(CheckpointError, match=r"number of heads.*--settings"):
        import_with(tmp_path, "absolute_vanilla", without)


def test_lengths_that_nobody_tells_are_asked_for(tmp_path: Path) -> None:
    settings, _ = read_golden("lm1b_like")
    without = {key: value for key, value in settings.items() if key not in ("tgt_len", "mem_len")}
    with pytest.raises(ConfigError, match=r"Give --memory-len and --segment-len"):
        import_with(tmp_path, "lm1b_like", without)
    import_with(tmp_path, "lm1b_like", without, segment_len=9, memory_len=5)
    bundle = load_bundle(tmp_path / "bundle")
    assert (bundle.segment_len, bundle.memory_len) == (9, 5)


def test_what_the_peers_get_wrong_is_refused_with_the_reason(tmp_path: Path) -> None:
    settings, golden = read_golden("absolute_vanilla")
    with pytest.raises(CheckpointError, match="not normalized"):
        import_with(tmp_path, "absolute_vanilla", {**settings, "pre_lnorm": True})
    weights = {**state_dict(golden), "r_emb": torch.zeros(2, 12, 4, 8)}
    torch.save(weights, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="attn_type 3"):
        import_model(tmp_path / "model.pt", tmp_path / "bundle", format="original")


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "by the original's descendants": lambda weights: {"model_state": weights, "step": 3},
    "by Lightning": lambda weights: {"state_dict": {f"model.{n}": w for n, w in weights.items()}, "epoch": 1},
    "by DeepSpeed": lambda weights: {"module": weights, "ds_version": "0.15"},
    "twice": lambda weights: {"model": {"model_state_dict": weights, "name": "a"}, "optimizer": {}},
}


@pytest.mark.parametrize("by", WRAPPED)
def test_a_state_dict_may_lie_inside_a_dict(by: str, tmp_path: Path) -> None:
    settings, golden = read_golden("lm1b_like")
    torch.save(WRAPPED[by](OrderedDict(state_dict(golden))), tmp_path / "model.pt")
    file = write_settings(tmp_path / "settings.json", settings)
    import_model(tmp_path / "model.pt", tmp_path / "bundle", format="original", settings=file)
    import_with(tmp_path / "plain", "lm1b_like", settings)
    assert_same_model(tmp_path / "bundle", tmp_path / "plain" / "bundle")


def test_a_dict_that_holds_itself_ends(tmp_path: Path) -> None:
    values: dict[str, Any] = {}
    values["model"] = values
    torch.save(values, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt holds nested dicts"):
        import_model(tmp_path / "model.pt", tmp_path / "bundle", format="original")


PREFIXES = ["module.", "_orig_mod.", "model.", "_orig_mod.module.", "module._orig_mod.model.", "model.model._orig_mod."]
PREFIXES += ["_forward_module.model.", "_fsdp_wrapped_module._checkpoint_wrapped_module."]


@pytest.mark.parametrize("format", FORMATS)
def test_what_wrappers_put_before_names_is_no_part_of_them(format: Format, tmp_path: Path) -> None:
    path, arguments = peers_file(tmp_path, format)
    file = path / "pytorch_model.bin" if format == "huggingface" else path
    whole, settings = file.read_bytes(), read_peer_settings(arguments.get("settings"))
    plain = READERS[format](path, user_settings=settings)
    for prefix in PREFIXES:
        change_weights(path, format, lambda weights, prefix=prefix: wrap(weights, prefix))
        wrapped = READERS[format](path, user_settings=settings)
        assert wrapped.model == plain.model, prefix
        assert (wrapped.vocab_size, wrapped.segment_len) == (plain.vocab_size, plain.segment_len)
        assert wrapped.memory_len == plain.memory_len
        assert wrapped.weights.keys() == plain.weights.keys()
        assert all(torch.equal(wrapped.weights[name], tensor) for name, tensor in plain.weights.items())
        file.write_bytes(whole)


def wrap(weights: dict[str, Tensor], prefix: str) -> None:
    """Put the prefix before every name."""
    for name in list(weights):
        weights[prefix + name] = weights.pop(name)


@pytest.mark.parametrize("format", FORMATS)
def test_layers_that_were_wrapped_one_by_one_are_read_too(format: Format, tmp_path: Path) -> None:
    path, arguments = peers_file(tmp_path, format)
    import_model(path, tmp_path / "plain", format=format, **arguments)

    def wrap(weights: dict[str, Tensor]) -> None:
        for name in list(weights):
            weights[re.sub(r"(layers\.\d+\.)", r"\1_fsdp_wrapped_module._orig_mod.", name)] = weights.pop(name)

    change_weights(path, format, wrap)
    import_model(path, tmp_path / "bundle", format=format, **arguments)
    assert_same_model(tmp_path / "bundle", tmp_path / "plain")


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module._orig_mod.transformer."])
def test_prefixes_in_safetensors_are_no_part_of_names(prefix: str, tmp_path: Path) -> None:
    settings, golden = read_golden("lm1b_like")
    file = write_settings(tmp_path / "settings.json", settings)
    weights = {name: tensor.clone() for name, tensor in state_dict(golden).items()}
    save_file(weights, tmp_path / "plain.safetensors")
    save_file({f"{prefix}{name}": tensor for name, tensor in weights.items()}, tmp_path / "wrapped.safetensors")
    import_model(tmp_path / "plain.safetensors", tmp_path / "plain", format="original", settings=file)
    if "transformer." in prefix:  # a part that is not a wrapper stays, and is named
        with pytest.raises(CheckpointError, match=r"Names that begin with `transformer\.` are from Hugging Face"):
            import_model(tmp_path / "wrapped.safetensors", tmp_path / "bundle", format="original", settings=file)
        return
    import_model(tmp_path / "wrapped.safetensors", tmp_path / "bundle", format="original", settings=file)
    assert_same_model(tmp_path / "bundle", tmp_path / "plain")


def test_two_tensors_of_one_name_and_different_values_are_refused(tmp_path: Path) -> None:
    path, arguments = peers_file(tmp_path, "original")
    name = "layers.0.dec_attn.o_net.weight"
    change_weights(path, "original", lambda weights: weights.update({f"module.{name}": weights[name].clone()}))
    import_model(path, tmp_path / "bundle", format="original", **arguments)
    change_weights(path, "original", lambda weights: weights.update({f"_orig_mod.{name}": weights[name] + 1}))
    with pytest.raises(
        CheckpointError, match=rf"{name} and _orig_mod.{name} must be the same tensor, but have different values"
    ):
        import_model(path, tmp_path / "other", format="original", **arguments)


@pytest.mark.parametrize(("widths", "expected"), [([410, 102, 25, 6], 4), ([10, 2], 4), ([16, 8, 4, 2], 2), ([32], 1)])
def test_the_divisor_is_found_from_widths_that_were_rounded_down(widths: list[int], expected: int) -> None:
    assert _div_value(widths) == expected


def test_weights_may_come_as_safetensors(tmp_path: Path) -> None:
    settings, golden = read_golden("lm1b_like")
    save_file(state_dict(golden), tmp_path / "model.safetensors")
    file = write_settings(tmp_path / "settings.json", settings)
    import_model(tmp_path / "model.safetensors", tmp_path / "bundle", format="original", settings=file)
    import_with(tmp_path / "plain", "lm1b_like", settings)
    assert_same_model(tmp_path / "bundle", tmp_path / "plain" / "bundle")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"attn_type": 2}, "attn_type 2"),
        ({"mem_len": 0}, "same_length"),
        ({"n_layer": 3}, r"layers\.2\..* is missing"),
        ({"cutoffs": [100, 200]}, r"emb_layers\.1\.weight has shape \[200, 8\], expected \[100, 8\]"),
        ({"cutoffs": [300, 100]}, r"cutoffs=\[300, 100\] must increase"),
        ({"cutoffs": 5}, "cutoffs = 5"),
        ({"vocab_size": 999}, r"emb_layers\.2\.weight has shape \[700, 2\], expected \[699, 2\]"),
        ({"untie_r": False}, r"r_w_bias is missing"),
        ({"same_length": "yes"}, "same_length = 'yes'"),
        ({"dropout": 1.5}, "dropout = 1.5"),
        ({"clamp_len": "far"}, "far"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    path, arguments = peers_file(tmp_path, "huggingface")
    values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps(values | config), encoding="utf-8")
    with pytest.raises(TxlError, match=message):
        import_model(path, tmp_path / "bundle", format="huggingface", **arguments)


def test_a_folder_that_tells_no_segment_length_gets_that_of_its_memory(tmp_path: Path) -> None:
    path, _ = peers_file(tmp_path, "huggingface")
    made = import_model(path, tmp_path / "bundle", format="huggingface")
    assert (made.segment_len, made.memory_len) == (20, 20)


def test_a_model_without_its_softmax_is_refused(tmp_path: Path) -> None:
    path, arguments = peers_file(tmp_path, "huggingface")

    def strip(weights: dict[str, Tensor]) -> None:
        kept = {k.removeprefix("transformer."): v for k, v in weights.items() if k.startswith("transformer.")}
        weights.clear()
        weights.update(kept)

    change_weights(path, "huggingface", strip)
    with pytest.raises(CheckpointError, match="TransfoXLLMHeadModel"):
        import_model(path, tmp_path / "bundle", format="huggingface", **arguments)


def test_weights_in_several_files_are_read_by_their_index(tmp_path: Path) -> None:
    path, arguments = peers_file(tmp_path, "huggingface")
    import_model(path, tmp_path / "whole", format="huggingface", **arguments)
    weights = torch.load(path / "pytorch_model.bin", weights_only=True)
    (path / "pytorch_model.bin").unlink()
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for part, keys in parts.items():
        save_file({key: weights[key].clone() for key in keys}, path / part)
    index = {"weight_map": {key: part for part, keys in parts.items() for key in keys}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    import_model(path, tmp_path / "parts", format="huggingface", **arguments)
    assert_same_model(tmp_path / "whole", tmp_path / "parts")


def assert_same_model(first: Path, second: Path) -> None:
    """Bit for bit, and in settings."""
    one, two = load_bundle(first), load_bundle(second)
    assert one.model.section == two.model.section
    assert (one.memory_len, one.segment_len) == (two.memory_len, two.segment_len)
    assert one.tokenizer.fingerprint == two.tokenizer.fingerprint
    weights, others = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("name", [name for name in ORIGINAL if name not in ("absolute_vanilla", "shaw_learned")])
def test_original_to_ours_to_hugging_face_to_ours_loses_no_bit(name: str, tmp_path: Path) -> None:
    settings, golden = read_golden(name)
    write_original_module(tmp_path / "model.pt", settings, state_dict(golden), legacy=False)
    import_model(tmp_path / "model.pt", tmp_path / "ours", format="original")
    to_huggingface(tmp_path / "ours", tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "back", format="huggingface")
    assert_same_model(tmp_path / "ours", tmp_path / "back")


def test_hugging_face_to_ours_to_hugging_face_loses_no_bit(tmp_path: Path) -> None:
    import_model(HUGGING_FACE, tmp_path / "ours", format="huggingface", segment_len=12)
    to_huggingface(tmp_path / "ours", tmp_path / "theirs")
    given = torch.load(HUGGING_FACE / "pytorch_model.bin", weights_only=True)
    written = load_file(tmp_path / "theirs" / "model.safetensors")
    # What is tied is written once.
    assert given.keys() - written.keys() == {
        *(f"crit.out_layers.{i}.weight" for i in range(3)),
        *(f"crit.out_projs.{i}" for i in (1, 2)),
    }
    assert all(torch.equal(tensor, given[name]) for name, tensor in written.items())
    before = json.loads((HUGGING_FACE / "config.json").read_text(encoding="utf-8"))
    after = json.loads((tmp_path / "theirs" / "config.json").read_text(encoding="utf-8"))
    assert {key: after[key] for key in before.keys() & after.keys()} == {
        key: before[key] for key in before.keys() & after.keys()
    } | {"eos_token_id": None}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_folder_of_any_type_comes_back_as_it_was_rounded(dtype: str, tmp_path: Path) -> None:
    import_model(HUGGING_FACE, tmp_path / "ours", format="huggingface", segment_len=12)
    to_huggingface(tmp_path / "ours", tmp_path / "theirs", dtype=dtype)
    import_model(tmp_path / "theirs", tmp_path / "back", format="huggingface", segment_len=12)
    ours, back = load_bundle(tmp_path / "ours").model, load_bundle(tmp_path / "back").model
    target = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    for name, parameter in back.named_parameters():
        assert torch.equal(parameter, ours.get_parameter(name).to(target).float()), name


def test_a_window_of_memory_and_self_is_said_in_hugging_faces_words(tmp_path: Path) -> None:
    settings, golden = read_golden("eval_same_length_clamp")
    file = write_nvidia_checkpoint(tmp_path / "checkpoint_last.pt", settings, state_dict(golden))
    import_model(file, tmp_path / "ours", format="nvidia")
    to_huggingface(tmp_path / "ours", tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "back", format="huggingface")
    ours, back = load_bundle(tmp_path / "ours"), load_bundle(tmp_path / "back")
    assert (back.model.section.same_length, back.memory_len) == ("memory", ours.memory_len + 1)
    text = " ".join(str(i % 257) for i in range(70))
    torch.testing.assert_close(LanguageModel(ours).score(text), LanguageModel(back).score(text), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"positions": "learned_relative", "num_distances": 9}, "learned_relative"),
        ({"positions": "absolute"}, "absolute"),
        ({"activation": "gelu"}, "gelu"),
        ({"pre_norm": True, "final_norm": True}, "final_norm"),
        ({"value_bias": True}, "value_bias"),
        ({"output_bias": True}, "output_bias"),
        ({"scale_embedding": False}, "scale_embedding"),
        ({"project_same_width": False, "cutoffs": (10, 20), "div_value": 2}, "project_same_width"),
        ({"dropout": 0.1, "embed_dropout": 0.2}, "embed_dropout"),
        ({"ff_dropout": 0.3}, "ff_dropout"),
        ({"width": 13}, "odd"),
    ],
)
def test_a_model_that_the_format_cannot_express_is_refused_with_the_reason(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    model = tiny_model(**changes)
    with pytest.raises(CheckpointError, match=f"cannot express this model.*{reason}"):
        write_huggingface(tmp_path / "theirs", model)
    assert not (tmp_path / "theirs").exists()


def test_options_that_change_nothing_are_no_reason_to_refuse(tmp_path: Path) -> None:
    write_huggingface(tmp_path / "theirs", tiny_model(dropout=0.1, embed_dropout=0.1, project_same_width=False))
    assert (tmp_path / "theirs" / "model.safetensors").is_file()


def test_a_folder_that_is_something_else_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "theirs"
    write_huggingface(out, tiny_model())
    write_huggingface(out, tiny_model(seed=1))
    shutil.rmtree(out)
    out.mkdir()
    (out / "thesis.tex").write_text("years of work", encoding="utf-8")
    (out / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="Choose another"):
        write_huggingface(out, tiny_model())
    assert (out / "thesis.tex").is_file()


def test_a_folder_downloaded_from_elsewhere_is_not_overwritten(tmp_path: Path) -> None:
    path, _ = peers_file(tmp_path, "huggingface")
    with pytest.raises(CheckpointError, match="Choose another"):
        write_huggingface(path, tiny_model())
    assert (path / "pytorch_model.bin").is_file()


def test_a_vocabulary_is_written_where_transformers_can_read_it(tmp_path: Path) -> None:
    write_huggingface(tmp_path / "ids", tiny_model())
    assert not (tmp_path / "ids" / "vocab.txt").exists(), "ids have no symbol for unknown words"
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(["<eos>", "<unk>", *(f"w{i}" for i in range(998))]) + "\n", encoding="utf-8")
    path, arguments = peers_file(tmp_path, "huggingface")
    import_model(path, tmp_path / "ours", format="huggingface", vocab=vocab, **arguments)
    to_huggingface(tmp_path / "ours", tmp_path / "theirs")
    assert (tmp_path / "theirs" / "vocab.txt").read_bytes() == vocab.read_bytes()
    config = json.loads((tmp_path / "theirs" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert (config["eos_token"], config["unk_token"]) == ("<eos>", "<unk>")
    import_model(tmp_path / "theirs", tmp_path / "back", format="huggingface")
    assert_same_model(tmp_path / "ours", tmp_path / "back")


def to_huggingface(bundle: Path, out: Path, *, dtype: str = "fp32") -> None:
    loaded = load_bundle(bundle)
    export_huggingface(out, loaded, dtype=dtype)


def write_huggingface(out: Path, model: TransformerXL) -> None:
    package = Package(
        section=model.section,
        weights=dict(model.state_dict()),
        tokenizer=identity_tokenizer(VOCAB_SIZE),
        segment_len=8,
        memory_len=8,
        source={},
        probe={},
    )
    export_huggingface(out, package)
