"""A folder that today's transformers loads and generates with, by code that lies in it (`huggingface_code`).

    configuration_txl.py, modeling_txl.py   the model and its memory: torch and transformers alone
    config.json, generation_config.json     settings, and which classes to load
    model.safetensors                       weights under our names, each tied tensor once
    tokenizer.json, tokenizer_config.json   the tokenizer for transformers, where it can be said there
    txl_tokenizer.json                      ours, as in a bundle
    README.md                               the model card, for people
    MANIFEST.json                           bytes and sha256 of each file

Where transformers 5 is installed, what was written is loaded and held against the bundle before it is published.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from txl_dist.artifacts import CODE, ArtifactKind
from txl_dist.config.registry import owner_of
from txl_dist.config.schema import SCHEMES
from txl_dist.convert.huggingface_tokenizer import write_tokenizers
from txl_dist.convert.output_dir import new_folder
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.inference.bundle import DTYPES, Bundle, probe_tolerance, prove
from txl_dist.inference.card import write_readme
from txl_dist.inference.probe import log_probabilities
from txl_dist.io.files import write_bytes
from txl_dist.io.tensor_files import write_tensors
from txl_dist.tokenizers.base import END_OF_TEXT, UNKNOWN

SOURCE = Path(__file__).parent / "huggingface_code"
MODULES = ("configuration_txl.py", CODE)
CHECKED_SEGMENTS = 5
AS_OURS = (
    *("num_layers", "width", "num_heads", "head_width", "ff_width", "cutoffs", "div_value", "tie_projections"),
    *("project_same_width", "scale_embedding", "pre_norm", "final_norm", "norm_eps", "activation", "value_bias"),
    *("norm", "query_key_norm", "residual_scalars", "value_residual"),
    *("output_bias", "positions", "num_distances", "share_biases", "same_length", "clamp_len"),
)
"""Settings of the model that stand in config.json under our names."""


class Written(NamedTuple):
    """Result of an export with code."""

    difference: float | None
    """Largest difference of a log-probability to the bundle, in nats; None where transformers 5 is not installed."""
    has_tokenizer: bool
    """Whether transformers can load the tokenizer."""


def export_huggingface_code(out: Path, bundle: Bundle) -> Written:
    """Write the folder of a model with its own code.

    Raises ConfigError for absolute positions, CheckpointError if the probe or the model that transformers loads differ,
    or the folder cannot be written.
    """
    section, tokenizer = bundle.section, bundle.tokenizer
    if not section.scheme.uses_memory:
        raise ConfigError(
            f"{section.positions} positions count from a segment's first token, and this code keeps a past that is "
            "addressed by distances. Export a bundle."
        )
    if owner_of(SCHEMES, section.positions) is not None:
        raise ConfigError(
            f"model.positions={section.positions!r} is of a plugin, which this code does not have. Export a bundle."
        )
    prove(bundle, bundle.model, bundle.dtype, where=str(out))
    with new_folder(out, kind=ArtifactKind.HUGGINGFACE_CODE) as folder:
        for name in MODULES:
            shutil.copyfile(SOURCE / name, folder / name)
        ids = {"bos_token_id": tokenizer.end_of_text, "eos_token_id": tokenizer.end_of_text}
        _write_json(folder / "config.json", _config(bundle) | ids)
        generation = {**ids, "pad_token_id": tokenizer.end_of_text}
        _write_json(folder / "generation_config.json", generation)
        weights = {name: parameter.detach().contiguous() for name, parameter in bundle.model.named_parameters()}
        write_tensors(folder / "model.safetensors", weights, metadata={"format": "pt"})
        if has_tokenizer := write_tokenizers(folder, bundle):
            _write_json(folder / "tokenizer_config.json", _tokenizer_config(bundle))
        difference = _difference(folder, bundle)
        tolerance = probe_tolerance({bundle.dtype}, largest_loss=float(bundle.probe["losses"].max()))
        if difference is not None and not difference <= tolerance:
            raise CheckpointError(f"transformers would differ by {difference:.3g} nats. Report this defect.")
        num_bytes = (folder / "model.safetensors").stat().st_size
        write_readme(folder, bundle.described(dtype=bundle.dtype, num_bytes=num_bytes), ArtifactKind.HUGGINGFACE_CODE)
    return Written(difference, has_tokenizer)


def _config(bundle: Bundle) -> dict[str, Any]:
    section = bundle.section
    settings = section.model_dump(mode="json")
    longer = section.same_length == "off"  # as `txl generate` has it
    return {
        "model_type": "txl",
        "architectures": ["TxlForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_txl.TxlConfig",
            "AutoModelForCausalLM": "modeling_txl.TxlForCausalLM",
        },
        "dtype": str(DTYPES[bundle.dtype]).removeprefix("torch."),
        "vocab_size": bundle.model.vocab_size,
        **{name: settings[name] for name in AS_OURS},
        "embed_width": section.embed_width_or_default(),
        "tie_weights_to_embedding": section.tie_weights,
        "tie_word_embeddings": False,
        "initializer_range": section.init_std,
        "segment_len": bundle.segment_len,
        "memory_len": bundle.memory_len,
        "generation_memory_len": max(bundle.memory_len, bundle.segment_len - 1) if longer else bundle.memory_len,
        "document_mask": bundle.document_mask,
    }


def _tokenizer_config(bundle: Bundle) -> dict[str, Any]:
    tokenizer = bundle.tokenizer
    mark = None if tokenizer.end_of_text is None else END_OF_TEXT
    unknown = {} if UNKNOWN not in tokenizer.symbols else {"unk_token": UNKNOWN}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **unknown,
        **({} if mark is None else {"bos_token": mark, "eos_token": mark, "pad_token": mark}),
        "padding_side": "left",
        "split_special_tokens": True,  # their spelling in a text is text
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_bytes(path, json.dumps(content, indent=2).encode() + b"\n")


@torch.no_grad()
def _difference(folder: Path, bundle: Bundle) -> float | None:
    """Over five segments, in nats; None where there is no transformers that knows what the code needs."""
    try:
        from txl_dist.convert.huggingface_code.modeling_txl import TxlForCausalLM
    except ImportError:
        return None
    from transformers.utils import logging

    with _without_progress(logging):
        model: Any = TxlForCausalLM.from_pretrained(folder, dtype=DTYPES[bundle.dtype])
    place_S = torch.arange(CHECKED_SEGMENTS * bundle.segment_len + 1)
    vocab_size, end_of_text = bundle.model.vocab_size, bundle.tokenizer.end_of_text
    tokens_1S = ((place_S * 7919 + 1) % vocab_size)[None]
    if end_of_text is not None:  # which may begin a document there: of several the plain model must be told
        tokens_1S = torch.where(tokens_1S == end_of_text, (end_of_text + 1) % vocab_size, tokens_1S)
    expected_1S = log_probabilities(
        bundle.model, tokens_1S, segment_len=bundle.segment_len, memory_len=bundle.memory_len
    )
    log_p_1SV = model.eval()(tokens_1S[:, :-1]).logits
    return float((log_p_1SV.gather(2, tokens_1S[:, 1:, None])[..., 0] - expected_1S).abs().max())


@contextmanager
def _without_progress(logging: Any) -> Iterator[None]:
    """Without the bar of transformers' own `logging`."""
    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()
