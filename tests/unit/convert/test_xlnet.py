"""XLNet folders: an import gives Hugging Face's numbers, and an export loads in transformers and can be imported
unchanged."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.xlnet import GOLDEN, first_memory, order_of, read_golden
from txl_dist.config.schema import ModelSection
from txl_dist.convert.export import (
    export_to_huggingface,
    export_to_huggingface_code,
    export_to_onnx,
    export_to_xlnet,
    load,
)
from txl_dist.convert.importer import import_model
from txl_dist.convert.xlnet import export_xlnet, import_xlnet, inexpressible
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.evaluation.target import open_target
from txl_dist.inference.bundle import load_bundle


def folder_like_golden(tmp_path: Path, **config: Any) -> Path:
    """The golden folder with other settings in its config.json."""
    folder = tmp_path / "xlnet"
    folder.mkdir()
    shutil.copy(GOLDEN / "model.safetensors", folder)
    content = json.loads((GOLDEN / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def transformers_with_xlnet() -> Any:
    """Return the module transformers. Skips the test if the module is missing or has no XLNet."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "XLNetLMHeadModel"):
        pytest.skip("this version of transformers has no XLNet")
    return transformers


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_an_imported_bundle_gives_the_losses_of_hugging_face(tmp_path: Path, suffix: str) -> None:
    folder = folder_like_golden(tmp_path)
    if suffix == "bin":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    made = import_model(folder, tmp_path / "bundle", format="xlnet")
    assert (made.segment_len, made.memory_len, made.vocab_size) == (12, 9, 61)
    bundle = load_bundle(tmp_path / "bundle")
    assert bundle.target_lengths.reuse_len == 6
    assert bundle.section.segment_terms, "the golden's segment terms are trained"
    golden = read_golden("typed")
    memory = first_memory(bundle.model, golden, like=bundle.model.embedding.weight(0))
    with torch.no_grad():
        hidden, _ = bundle.model(golden.of("input_ids", 0), memory, order=order_of(golden, 0, with_types=True))
        labels = golden.of("labels", 0)
        nll = bundle.model.softmax(hidden, labels.clamp(min=0))
    assert float(nll[labels >= 0].mean()) == pytest.approx(float(golden.of("loss", 0)), rel=1e-5)


def test_an_export_is_the_imported_folder_again_and_loads_in_transformers(tmp_path: Path) -> None:
    import_model(folder_like_golden(tmp_path), tmp_path / "bundle", format="xlnet")
    export_to_xlnet(tmp_path / "bundle", tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (GOLDEN, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = import_xlnet(tmp_path / "out", user_settings={})
    assert again.model == load_bundle(tmp_path / "bundle").section
    transformers = transformers_with_xlnet()
    model = transformers.XLNetLMHeadModel.from_pretrained(tmp_path / "out").eval()
    golden = read_golden("permutation")
    with torch.no_grad():
        output = model(
            input_ids=golden.of("input_ids", 0),
            perm_mask=golden.of("perm_mask", 0),
            target_mapping=golden.of("target_mapping", 0),
        )
    assert torch.allclose(output.logits, golden.of("logits", 0), atol=1e-5)
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", num_labels=3).eval()
    assert classifier(input_ids=golden.of("input_ids", 0)).logits.shape == (3, 3)


def test_a_model_of_one_direction_becomes_a_model_that_predicts_the_next_token(tmp_path: Path) -> None:
    folder = folder_like_golden(tmp_path, attn_type="uni", reuse_len=None)
    import_model(folder, tmp_path / "bundle", format="xlnet", segment_len=12)
    bundle = load_bundle(tmp_path / "bundle")
    assert not bundle.section.any_order
    golden = read_golden("causal")
    with torch.no_grad():
        memory = bundle.model.empty_memory(num_lanes=3, memory_len=golden.memory_len)
        hidden, _ = bundle.model(golden.of("input_ids", 0), memory)
        nll = bundle.model.softmax(hidden, golden.of("labels", 0))
    assert float(nll.mean()) == pytest.approx(float(golden.of("loss", 0)), rel=1e-5)


def test_a_model_that_predicts_the_next_token_is_exported_with_one_direction(tmp_path: Path) -> None:
    folder = folder_like_golden(tmp_path, attn_type="uni", reuse_len=None)
    import_model(folder, tmp_path / "bundle", format="xlnet", segment_len=12)
    export_to_xlnet(tmp_path / "bundle", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["attn_type"] == "uni"
    assert import_xlnet(tmp_path / "out", user_settings={}).model == load_bundle(tmp_path / "bundle").section
    transformers = transformers_with_xlnet()
    model = transformers.XLNetLMHeadModel.from_pretrained(tmp_path / "out").eval()
    golden = read_golden("causal")
    with torch.no_grad():
        output = model(input_ids=golden.of("input_ids", 0))
        labels = golden.of("labels", 0)
        loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    assert float(loss) == pytest.approx(float(golden.of("loss", 0)), rel=1e-5)


def test_segment_terms_that_are_zero_are_left_out_and_written_as_zeros(tmp_path: Path) -> None:
    folder = folder_like_golden(tmp_path)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("r_s_bias", "seg_embed")):
            tensor.zero_()
    save_file(weights, folder / "model.safetensors")
    import_model(folder, tmp_path / "bundle", format="xlnet")
    assert not load_bundle(tmp_path / "bundle").section.segment_terms
    export_to_xlnet(tmp_path / "bundle", tmp_path / "out")
    assert all(
        torch.equal(tensor, weights[name]) for name, tensor in load_file(tmp_path / "out/model.safetensors").items()
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bert"}, "describes a model of type bert, not xlnet. Name the folder"),
        ({"ff_activation": "gelu_new"}, "ff_activation is 'gelu_new', but txl_dist imports only"),
        ({"n_layer": 4}, r"transformer\.layer\.3\.\S+ is missing"),
        ({"n_layer": 2}, r"transformer\.layer\.2\.\S+ .*surplus"),
        ({"d_inner": 50}, r"ff\.layer_1\.weight has shape \[48, 32\], expected \[50, 32\]"),
        ({"n_head": "four"}, "n_head"),
        ({"n_head": 0, "d_head": None}, r"n_head = 0: Input should be greater than 0\. Correct the settings"),
        ({"reuse_len": -3, "seq_len": 12}, r"reuse_len = -3: Input should be greater than or equal to 0\. Correct"),
        ({"attn_type": "uni", "same_length": True}, r"same_length is true .* Set same_length to false"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        import_xlnet(folder_like_golden(tmp_path, **config), user_settings={})


def test_unknown_keys_are_refused(tmp_path: Path) -> None:
    folder = folder_like_golden(tmp_path)
    with pytest.raises(CheckpointError, match=r"an unknown name n_layers\. Did you mean n_layer\?"):
        import_xlnet(folder, user_settings={"n_layers": 3})
    weights = load_file(folder / "model.safetensors") | {"transformer.layer.0.adapter.weight": torch.zeros(4)}
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        import_xlnet(folder, user_settings={})
    assert "transformer.layer.0.adapter.weight [4] is surplus. Check the format, the architecture" in str(caught.value)


def test_training_in_both_directions_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import_xlnet(folder_like_golden(tmp_path, bi_data=True), user_settings={})
    assert "bi_data is true" in caplog.text


def test_what_an_xlnet_folder_cannot_express_is_named(tmp_path: Path) -> None:
    expressible = import_xlnet(folder_like_golden(tmp_path), user_settings={}).model
    assert inexpressible(expressible) == []
    changes: dict[str, Any] = {"cutoffs": (20,), "norm": "rms", "share_biases": True, "pre_norm": True}
    for name, value in changes.items():
        (reason,) = inexpressible(expressible.model_copy(update={name: value}))
        assert reason.startswith(f"model.{name} is ")
    assert len(inexpressible(ModelSection())) == 2
    import_model(tmp_path / "xlnet", tmp_path / "bundle", format="xlnet")
    package = load_bundle(tmp_path / "bundle")
    other = package.section.model_copy(update={"cutoffs": (20,)})
    object.__setattr__(package, "section", other)
    with pytest.raises(CheckpointError, match=r"cannot express this model: model\.cutoffs"):
        export_xlnet(tmp_path / "out", package)


def test_dropout_rates_that_an_xlnet_folder_cannot_hold_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import_model(folder_like_golden(tmp_path), tmp_path / "bundle", format="xlnet")
    package = load_bundle(tmp_path / "bundle")
    export_xlnet(tmp_path / "out", package)
    assert "dropout" not in caplog.text
    section = package.section.model_copy(update={"dropout": 0.2, "attention_dropout": 0.0, "ff_dropout": 0.2})
    export_xlnet(tmp_path / "out", dataclasses.replace(package, section=section))
    assert "will hold model.dropout=0.2, and not model.attention_dropout=0.0. The scores" in caplog.text


def test_whatever_needs_the_next_token_refuses_the_model(tmp_path: Path) -> None:
    bundle, out = tmp_path / "bundle", tmp_path / "out"
    import_model(folder_like_golden(tmp_path), bundle, format="xlnet")
    uses: dict[str, Callable[[], Any]] = {
        "generate, serve, adapt, lm-eval": lambda: load(bundle),
        "recl": lambda: open_target(bundle, data="corpus"),
        "onnx": lambda: export_to_onnx(bundle, out),
        "huggingface": lambda: export_to_huggingface(bundle, out),
        "huggingface-code": lambda: export_to_huggingface_code(bundle, out),
    }
    for use in uses.values():
        with pytest.raises(ConfigError, match=r"predicts tokens in any order \(model\.any_order\)") as caught:
            use()
        assert "can be scored with `txl evaluate`, and exported with `txl export`" in str(caught.value)
        assert not out.exists()


def test_the_card_of_a_folder_or_bundle_names_only_commands_that_take_it(tmp_path: Path) -> None:
    import_model(folder_like_golden(tmp_path), tmp_path / "bundle", format="xlnet")
    export_to_xlnet(tmp_path / "bundle", tmp_path / "out")
    cards = [(tmp_path / name / "README.md").read_text() for name in ("bundle", "out")]
    for card in cards:
        for refused in ("generat", "txl serve", "txl_dist.load", "TransfoXL", "--format huggingface"):
            assert refused not in card
    assert "txl export . FOLDER --format xlnet" in cards[0]
    assert 'XLNetForSequenceClassification.from_pretrained(".")' in cards[1]
    assert "txl import . BUNDLE --format xlnet" in cards[1]


def test_a_folder_that_save_pretrained_wrote_is_not_replaced(tmp_path: Path) -> None:
    """The downloaded model would be lost."""
    folder = folder_like_golden(tmp_path)
    import_model(folder, tmp_path / "bundle", format="xlnet")
    with pytest.raises(CheckpointError, match="was not written by `txl export`"):
        export_to_xlnet(tmp_path / "bundle", folder)
    assert (folder / "config.json").read_text() != ""
    for _ in range(2):  # an older export is replaced
        export_to_xlnet(tmp_path / "bundle", tmp_path / "out")
