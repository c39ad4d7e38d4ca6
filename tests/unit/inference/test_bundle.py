"""A bundle contains the trained model, its probe proves it, and a damaged bundle is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import txl_dist
from tests.helpers.checkpoints import GOLDEN_CHECKPOINT
from tests.helpers.models import tiny_section
from txl_dist.cli.main import main
from txl_dist.config.load import load_config
from txl_dist.console import formatting as tables
from txl_dist.console.logging import start_logging
from txl_dist.convert.export import export_bundle, export_to_huggingface, export_to_huggingface_code, export_to_onnx
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.inference.bundle import DTYPES, PROBE_TOLERANCE, Package, load_bundle, write_bundle
from txl_dist.inference.language_model import LanguageModel
from txl_dist.inference.options import InferencePrecision
from txl_dist.inference.probe import probe_of
from txl_dist.inference.weights import STORED
from txl_dist.io.manifest import describe_file, files_of, write_manifest
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.tokenizers.base import Tokenizer
from txl_dist.tokenizers.training import train_tokenizer
from txl_dist.tokenizers.word_tokenizer import WordTokenizer
from txl_dist.train.engine import precision as precision_file
from txl_dist.train.engine.precision import Bf16Support

MEMORY_LEN = 16
CHECKED = ["MANIFEST.json", "card.json", "config.json", "model.safetensors", "probe.safetensors", "tokenizer.json"]
CHECKED += ["train.toml"]
FILES = [CHECKED[0], "README.md", *CHECKED[1:]]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"tie_weights": False},
    "adaptive_tied": {"cutoffs": (20, 100), "div_value": 2, "tie_projections": (False, True, True)},
    "adaptive_untied": {"cutoffs": (20, 100), "tie_weights": False, "share_biases": False, "pre_norm": True},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer("byte", lambda: ["the cat sat on the mat, the dog did not"])


def trained(tokenizer: Tokenizer, *, seed: int = 0, **changes: Any) -> TransformerXL:
    torch.manual_seed(seed)
    section = tiny_section(init_std=0.1, projection_init_std=0.1, **changes)
    return TransformerXL(section, vocab_size=tokenizer.vocab_size).eval()


def package_of(model: TransformerXL, tokenizer: Tokenizer, **changes: Any) -> Package:
    values: dict[str, Any] = {
        "section": model.section,
        "weights": dict(model.named_parameters()),
        "tokenizer": tokenizer,
        "segment_len": 16,
        "memory_len": MEMORY_LEN,
        "source": {"run": "quick", "step": 7},
        "probe": probe_of(model, memory_len=MEMORY_LEN),
    }
    return Package(**{**values, **changes})


def write(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    dtype: str = "fp32",
    **changes: Any,
) -> TransformerXL:
    model = trained(tokenizer, seed=seed, **(settings or {}))
    write_bundle(folder, package_of(model, tokenizer, **changes), dtype=dtype)
    return model


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_bundle_gives_back_the_weights_bit_for_bit_in_its_type(
    tmp_path: Path, tokenizer: Tokenizer, name: str, dtype: str
) -> None:
    # The probe is the fp32 model's: the stated tolerance of each type must cover the cast.
    model = write(tmp_path / "bundle", tokenizer, settings=VARIANTS[name], dtype=dtype)
    bundle = load_bundle(tmp_path / "bundle")
    loaded = dict(bundle.model.named_parameters())
    assert loaded.keys() == dict(model.named_parameters()).keys()
    for key, parameter in model.named_parameters():
        assert loaded[key].dtype == DTYPES[dtype]
        assert torch.equal(loaded[key], parameter.to(DTYPES[dtype])), key
    assert bundle.model.section == model.section
    assert not bundle.model.training
    assert bundle.tokenizer.fingerprint == tokenizer.fingerprint
    assert (bundle.segment_len, bundle.memory_len, bundle.document_mask) == (16, MEMORY_LEN, False)
    assert (bundle.dtype, bundle.source) == (dtype, {"run": "quick", "step": 7})
    assert sorted(content_of(tmp_path / "bundle")) == FILES
    assert list(tmp_path.iterdir()) == [tmp_path / "bundle"], "nothing temporary is left"


def test_layers_that_remember_differently_are_carried_and_other_formats_refuse_them(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    memory_lens = (2, MEMORY_LEN, 5)
    torch.manual_seed(0)
    section = tiny_section(init_std=0.1, projection_init_std=0.1)
    model = TransformerXL(section, vocab_size=tokenizer.vocab_size, memory_lens=memory_lens).eval()
    package = package_of(model, tokenizer, memory_lens=memory_lens)
    assert write_bundle(tmp_path / "bundle", package) <= 1e-6
    bundle = load_bundle(tmp_path / "bundle")
    assert bundle.memory_lens == bundle.model.memory_lens == memory_lens
    assert json.loads((tmp_path / "bundle" / "config.json").read_text())["format_version"] == 4
    assert load_config(tmp_path / "bundle" / "train.toml").train.memory_lens == memory_lens
    lm = LanguageModel(bundle)
    text = "the cat sat on the mat, the dog did not"
    memory = lm.memory(text)
    memory.save(tmp_path / "memory")
    again = lm.load_memory(tmp_path / "memory")
    assert len({one.shape[2] for one in again.past.key_values}) > 1
    assert all(torch.equal(*pair) for pair in zip(again.past.key_values, memory.past.key_values, strict=True))
    sampling = {"max_tokens": 20, "temperature": 0.0}
    on_from = lm.generate(" and", memory=again, **sampling).text
    assert on_from == lm.generate(text + " and", **sampling).text
    for export in (export_to_huggingface, export_to_huggingface_code, export_to_onnx):
        with pytest.raises(ConfigError, match=r"memory_lens=\[2, 16, 5\]\) can be exported only to a bundle"):
            export(tmp_path / "bundle", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_writing_reports_the_largest_error_on_the_probe(tmp_path: Path, tokenizer: Tokenizer) -> None:
    package = package_of(trained(tokenizer), tokenizer)
    errors = {dtype: write_bundle(tmp_path / dtype, package, dtype=dtype) for dtype in DTYPES}
    assert errors["fp32"] == 0.0
    assert 0 < errors["fp16"] <= PROBE_TOLERANCE["fp16"]
    assert errors["fp16"] < errors["bf16"] <= PROBE_TOLERANCE["bf16"]


@pytest.mark.parametrize("name", VARIANTS)
def test_an_int8_bundle_is_read_as_fp32_and_says_what_it_is(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    model = write(tmp_path / "bundle", tokenizer, settings=VARIANTS[name], dtype="int8")
    bundle = load_bundle(tmp_path / "bundle")
    assert bundle.dtype == "int8"
    for key, parameter in bundle.model.named_parameters():
        original = dict(model.named_parameters())[key]
        assert parameter.dtype == torch.float32
        assert (parameter - original).abs().max() <= original.abs().max() / 127, key
    content = json.loads((tmp_path / "bundle" / "config.json").read_text())
    assert (content["dtype"], content["format_version"]) == ("int8", 4), "older programs refuse it by its version"
    assert txl_dist.load(tmp_path / "bundle").generate("the ", max_tokens=3, seed=0).ids


def test_an_int8_bundle_without_all_its_scales_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write(tmp_path / "bundle", tokenizer, dtype="int8")
    path = tmp_path / "bundle" / "model.safetensors"
    held, name = load_file(path), "blocks.1.ff_in.weight.scale"
    for scales in ({}, {name: held[name][:-1].clone()}):
        save_file({key: tensor for key, tensor in held.items() if key != name} | scales, path)
        write_manifest(path.parent, {file: describe_file(path.parent / file) for file in files_of(path.parent)})
        with pytest.raises(CheckpointError, match=rf"cannot be read: .*{name}"):
            load_bundle(path.parent)


@pytest.mark.parametrize("settings", [{}, {"cutoffs": (20, 100), "div_value": 2}])
def test_int8_is_at_most_three_tenths_of_fp32(tmp_path: Path, tokenizer: Tokenizer, settings: dict[str, Any]) -> None:
    wide = {"width": 96, "num_heads": 3, "head_width": 32, "ff_width": 256, **settings}
    sizes = []
    for dtype in ("fp32", "int8"):
        write(tmp_path / dtype, tokenizer, settings=wide, dtype=dtype)
        sizes.append((tmp_path / dtype / "model.safetensors").stat().st_size)
    assert sizes[1] <= 0.3 * sizes[0]


def test_a_bundle_of_rounded_weights_stays_what_it_is_in_every_type(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write(tmp_path / "int8", tokenizer, dtype="int8")
    for dtype in STORED:
        export_bundle(tmp_path / "int8", tmp_path / f"again_{dtype}", dtype=dtype)
    ours = dict(load_bundle(tmp_path / "int8").model.named_parameters())
    for dtype in ("fp32", "int8"):
        for key, parameter in load_bundle(tmp_path / f"again_{dtype}").model.named_parameters():
            assert torch.equal(parameter, ours[key]), (dtype, key)
    content = json.loads((tmp_path / "again_fp32" / "config.json").read_text())
    assert (content["probe_dtype"], content["format_version"]) == ("int8", 4)


def test_int8_is_for_bundles_and_the_export_says_its_size(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "bundle", tokenizer)
    command = ["export", str(tmp_path / "bundle"), str(tmp_path / "out"), "--dtype", "int8"]
    assert main([*command, "--format", "huggingface"]) == 2
    assert "int8 weights can be stored only in bundles" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(command) == 0
    said = capsys.readouterr().out
    num_bytes = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert f"weights {tables.format_bytes(num_bytes)} in int8, 0." in said


def test_a_bundle_that_does_not_reproduce_its_probe_is_not_exported(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write(tmp_path / "bundle", tokenizer)
    path = tmp_path / "bundle" / "probe.safetensors"
    probe = load_file(path)
    save_file({**probe, "losses": probe["losses"] + 0.01}, path)  # within the tolerance of bf16, not of fp32
    write_manifest(path.parent, {name: describe_file(path.parent / name) for name in files_of(path.parent)})
    with pytest.raises(CheckpointError, match="does not reproduce its probe"):
        export_bundle(tmp_path / "bundle", tmp_path / "out", dtype="bf16")
    assert not (tmp_path / "out").exists()


def test_a_bundle_scores_text_as_the_model_scores_its_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = write(tmp_path / "bundle", tokenizer)
    lm, text = txl_dist.load(tmp_path / "bundle"), "the dog sat \u00e9"
    scores = lm.score(text)
    ids = [tokenizer.end_of_text, *tokenizer.encode(text).tolist()]
    hidden, _ = model(torch.tensor([ids[:-1]]), model.empty_memory(num_lanes=1, memory_len=MEMORY_LEN))
    expected = model.softmax.log_probabilities(hidden[0]).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert (scores - expected).abs().max() <= 1e-5
    assert lm.generate("the ", max_tokens=5, seed=3) == lm.generate("the ", max_tokens=5, seed=3)


@pytest.mark.parametrize("name", CHECKED)
def test_a_flipped_byte_in_any_file_is_refused_by_its_name(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    folder, generator = tmp_path / "bundle", random.Random(name)
    write(folder, tokenizer)
    whole = (folder / name).read_bytes()
    for position in [0, len(whole) // 2, len(whole) - 2, *generator.choices(range(len(whole)), k=8)]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << generator.randrange(8)
        (folder / name).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=name):
            load_bundle(folder)
    (folder / name).write_bytes(whole)
    load_bundle(folder)


@pytest.mark.parametrize("name", CHECKED)
def test_a_missing_or_truncated_file_is_refused(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    folder = tmp_path / "bundle"
    write(folder, tokenizer)
    whole = (folder / name).read_bytes()
    for size in (0, 1, len(whole) // 2):
        (folder / name).write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=name):
            load_bundle(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        load_bundle(folder)


@pytest.mark.parametrize("dtype", STORED)
def test_weights_that_do_not_reproduce_the_probe_are_refused_and_nothing_is_left(
    tmp_path: Path, tokenizer: Tokenizer, dtype: str
) -> None:
    other = trained(tokenizer, seed=1)
    with pytest.raises(CheckpointError, match="does not reproduce its probe"):
        write(tmp_path / "bundle", tokenizer, probe=probe_of(other, memory_len=MEMORY_LEN), dtype=dtype)
    assert list(tmp_path.iterdir()) == []
    model = trained(tokenizer)
    scale = 1.0 if dtype == "fp32" else max(5.0, probe_of(model, memory_len=MEMORY_LEN)["losses"].max().item())
    for error in (2 * PROBE_TOLERANCE[dtype] * scale, -2 * PROBE_TOLERANCE[dtype] * scale, float("nan")):
        probe = probe_of(model, memory_len=MEMORY_LEN)
        probe["losses"][0, -1] += error  # one loss of the second segment
        with pytest.raises(CheckpointError, match="does not reproduce its probe"):
            write(tmp_path / "bundle", tokenizer, probe=probe, dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_a_probe_of_a_half_precision_engine_is_held_to_the_tolerance_of_that_type(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    # The engine's weights are fp32, but it ran them in bf16.
    probe = probe_of(trained(tokenizer).to(torch.bfloat16), memory_len=MEMORY_LEN)
    with pytest.raises(CheckpointError, match="does not reproduce its probe"):
        write(tmp_path / "bundle", tokenizer, probe=probe)
    model = write(tmp_path / "bundle", tokenizer, probe=probe, probe_dtype="bf16")
    loaded = dict(load_bundle(tmp_path / "bundle").model.named_parameters())
    assert all(torch.equal(loaded[key], parameter) for key, parameter in model.named_parameters())


def test_the_probe_notices_a_wrong_memory(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = trained(tokenizer)
    with pytest.raises(CheckpointError, match="does not reproduce its probe"):
        write(tmp_path / "bundle", tokenizer, probe=probe_of(model, memory_len=0))


def test_an_empty_folder_may_become_a_bundle(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "mine").mkdir()
    model = write(tmp_path / "mine", tokenizer)
    assert load_bundle(tmp_path / "mine").model.section == model.section


@pytest.mark.parametrize("content", [{"notes.txt": "mine"}, {"MANIFEST.json": "{}", "state.json": "{}"}])
def test_a_folder_that_is_no_bundle_is_refused_and_untouched(
    tmp_path: Path, tokenizer: Tokenizer, content: dict[str, str]
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, text in content.items():
        (folder / name).write_text(text)
    before = content_of(folder)
    with pytest.raises(CheckpointError, match="is not a bundle"):
        write(folder, tokenizer)
    assert content_of(folder) == before
    assert list(tmp_path.iterdir()) == [folder]
    with pytest.raises(CheckpointError, match="is not a bundle"):
        load_bundle(folder)


def test_an_older_bundle_is_replaced_only_by_a_proven_one(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = tmp_path / "bundle"
    write(folder, tokenizer)
    before = content_of(folder)
    other = trained(tokenizer, seed=2)
    with pytest.raises(CheckpointError, match="does not reproduce its probe"):
        write(folder, tokenizer, seed=1, probe=probe_of(other, memory_len=MEMORY_LEN))
    assert content_of(folder) == before
    write(folder, tokenizer, seed=1)
    model = trained(tokenizer, seed=1)
    loaded = dict(load_bundle(folder).model.named_parameters())
    assert all(torch.equal(loaded[key], parameter) for key, parameter in model.named_parameters())
    assert list(tmp_path.iterdir()) == [folder]


def test_weights_of_another_model_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = trained(tokenizer)
    weights: dict[str, Tensor] = dict(model.named_parameters())
    missing = {key: value for key, value in weights.items() if key != "blocks.1.ff_in.weight"}
    surplus = {**weights, "blocks.9.ff_in.weight": torch.zeros(1)}
    wrong = {**weights, "embedding.weight_0": torch.zeros(3, 12)}
    for given, name in [
        (missing, "blocks.1.ff_in.weight"),
        (surplus, "blocks.9.ff_in.weight"),
        (wrong, "embedding.weight_0"),
    ]:
        with pytest.raises(CheckpointError, match=f"do not fit the model.*{name}"):
            write(tmp_path / "bundle", tokenizer, weights=given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("border", "document_mask"), [("carry", False), ("mask", True)])
def test_a_bundle_of_an_earlier_format_is_the_same_model(
    tmp_path: Path, tokenizer: Tokenizer, border: str, document_mask: bool
) -> None:
    """Formats 1 to 3 have `document_border` in place of `document_mask`."""
    folder = tmp_path / "bundle"
    write(folder, tokenizer, document_mask=document_mask)
    now = load_bundle(folder)
    content = json.loads((folder / "config.json").read_text())
    assert content.pop("document_mask") == document_mask
    for version in (1, 2, 3):
        old = content | {"format_version": version, "document_border": border}
        (folder / "config.json").write_text(json.dumps(old))
        write_manifest(folder, {name: describe_file(folder / name) for name in files_of(folder)})
        then = load_bundle(folder)
        assert then.document_mask == document_mask
        assert then.begins_documents == now.begins_documents
        for one, other in zip(then.model.parameters(), now.model.parameters(), strict=True):
            assert torch.equal(one, other)


def test_a_bundle_of_a_later_format_or_with_unreadable_settings_is_refused(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = tmp_path / "bundle"
    write(folder, tokenizer)
    content = json.loads((folder / "config.json").read_text())
    for changes, message in [
        ({"format_version": 99}, "format version 99"),
        ({"dtype": "int3"}, "cannot be read"),
        ({"model": {"num_layerz": 3}}, "cannot be read"),
    ]:
        (folder / "config.json").write_text(json.dumps({**content, **changes}))
        write_manifest(folder, {name: describe_file(folder / name) for name in files_of(folder)})
        with pytest.raises(CheckpointError, match=message):
            load_bundle(folder)


def test_a_folder_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="Choose a folder that can be written"):
        write(tmp_path / "file" / "bundle", tokenizer)


def test_a_checkpoint_is_not_taken_for_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        with pytest.raises(CheckpointError, match="txl export"):
            load_bundle(tmp_path / name)
    with pytest.raises(CheckpointError, match="is not a bundle"):
        load_bundle(GOLDEN_CHECKPOINT)


def test_a_model_without_memory_still_sees_a_segment_of_context_when_it_generates(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    write(tmp_path / "bundle", tokenizer, memory_len=0, probe=probe_of(trained(tokenizer), memory_len=0))
    bundle = load_bundle(tmp_path / "bundle")
    ids = [tokenizer.end_of_text, *map(int, tokenizer.encode("some text"))]
    expected: list[int] = []
    for _ in range(5):
        tokens = torch.tensor([[*ids, *expected]])
        hidden, _ = bundle.model(tokens, bundle.model.empty_memory(num_lanes=1, memory_len=0))
        expected.append(int(bundle.model.softmax.log_probabilities(hidden[:, -1]).argmax()))
    assert LanguageModel(bundle).generate("some text", max_tokens=5, temperature=0.0).text == tokenizer.decode(expected)


def test_a_model_trained_with_document_masks_begins_documents_but_not_one_of_before(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    write(tmp_path / "carry", tokenizer)
    write(tmp_path / "mask", tokenizer, document_mask=True)
    num_tokens = len(tokenizer.encode("text"))
    for name in ("carry", "mask"):
        lm = txl_dist.load(tmp_path / name)
        assert lm.score("text").shape == (num_tokens,)
        assert lm.generate("", max_tokens=2, temperature=0.0).text
    for name in ("carry", "mask"):  # as older programs wrote them
        path = tmp_path / name / "config.json"
        content = json.loads(path.read_text())
        del content["begins_documents"]
        path.write_text(json.dumps(content))
        write_manifest(path.parent, {name: describe_file(path.parent / name) for name in files_of(path.parent)})
    assert txl_dist.load(tmp_path / "carry").score("text").shape == (num_tokens,)
    old = txl_dist.load(tmp_path / "mask")
    assert old.score("text").shape == (num_tokens - 1,), "its first tokens were never scored"
    with pytest.raises(ConfigError, match="therefore cannot begin a document"):
        old.generate("", max_tokens=2)


def test_a_model_whose_vocabulary_has_no_end_of_text_needs_a_prompt_and_never_stops_early(tmp_path: Path) -> None:
    symbols = [str(i) for i in range(257)]
    words = WordTokenizer(symbols, end_of_text=None, line_end=None, unknown=None)
    write(tmp_path / "bundle", words)
    lm = txl_dist.load(tmp_path / "bundle")
    assert lm.tokenizer.fingerprint == words.fingerprint
    assert lm.score("3 1 4 1 5").shape == (4,), "nothing precedes the first token"
    assert lm.score("3").shape == lm.score("").shape == (0,)
    with pytest.raises(ConfigError, match="no end-of-text"):
        lm.generate("", max_tokens=2)
    for seed in range(5):
        assert len(words.encode(lm.generate("3 1", max_tokens=40, seed=seed).text)) == 40


@pytest.mark.parametrize("stored", ["fp32", "bf16", "int8"])
def test_a_bundle_of_any_type_runs_in_the_precision_that_is_asked_for(
    tmp_path: Path, tokenizer: Tokenizer, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision_file, "bf16_support", lambda device: Bf16Support(True, "AMX"))
    write(tmp_path / "bundle", tokenizer, dtype=stored)
    as_stored = txl_dist.load(tmp_path / "bundle")
    expected = as_stored.score("the dog sat")
    asked: tuple[InferencePrecision, ...] = ("fp32", "bf16")
    for precision in asked:
        lm = txl_dist.load(tmp_path / "bundle", precision=precision)
        assert {parameter.dtype for parameter in lm.network.parameters()} == {DTYPES[precision]}
        assert (lm.score("the dog sat") - expected).abs().max() <= PROBE_TOLERANCE["bf16"] * 5
        assert len(lm.generate("the ", max_tokens=3).ids) == 3
    assert as_stored.network.embedding.weight(0).dtype == DTYPES.get(stored, torch.float32)


@pytest.mark.parametrize(("stored", "precision"), [("fp32", "bf16"), ("bf16", "stored")])
def test_a_device_that_emulates_bf16_is_named_in_a_warning(
    tmp_path: Path,
    tokenizer: Tokenizer,
    stored: str,
    precision: InferencePrecision,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(precision_file, "bf16_instructions", lambda: "")
    write(tmp_path / "bundle", tokenizer, dtype=stored)
    start_logging()
    txl_dist.load(tmp_path / "bundle", precision=precision)
    warning = "inference in bf16 is slower than in fp32 here: the processor has neither AMX nor AVX-512 BF16"
    assert f"{warning}. Choose precision fp32 (--precision fp32)" in capsys.readouterr().err
    txl_dist.load(tmp_path / "bundle", precision="fp32")
    assert capsys.readouterr().err == ""


def test_a_precision_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    precision: Any = "fp8"
    with pytest.raises(ConfigError, match="precision='fp8': it must be stored, fp32, bf16"):
        txl_dist.load(tmp_path, precision=precision)
