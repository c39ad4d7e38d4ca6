"""Export of a folder that current versions of transformers load, with code in the folder (`huggingface_code`).

    configuration_txl.py, modeling_txl.py   the model and its memory: torch and transformers alone
    config.json, generation_config.json     settings, and which classes to load
    model.safetensors                       weights under this package's names, each tied tensor once
    tokenizer.json, tokenizer_config.json   the tokenizer for transformers, if `tokenizers` has an equal one
    txl_tokenizer.json                      this package's tokenizer, as in a bundle
    README.md                               the model card
    MANIFEST.json                           size and sha256 of each file

If transformers 5 is installed, the folder is loaded and compared with the bundle before it is published.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from txl_dist.artifacts import CODE, ArtifactKind
from txl_dist.config.registry import owner_of
from txl_dist.config.schema import SCHEMES
from txl_dist.convert.huggingface_tokenizer import special_tokens_of, write_tokenizers
from txl_dist.convert.output_dir import new_folder, write_json
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.inference.bundle import DTYPES, Bundle, probe_tolerance, prove, require_causal
from txl_dist.inference.card import write_readme
from txl_dist.inference.probe import log_probabilities
from txl_dist.io.tensor_files import write_tensors

SOURCE = Path(__file__).parent / "huggingface_code"
"""Folder of the code that is copied into an export."""
MODULES = ("configuration_txl.py", CODE)
"""Names of the code files that are copied into an export."""
CHECKED_SEGMENTS = 5
"""Number of segments on which the written model is compared with the bundle."""
SAME_NAMES = (
    "num_layers",
    "width",
    "num_heads",
    "head_width",
    "ff_width",
    "cutoffs",
    "div_value",
    "tie_projections",
    "project_same_width",
    "scale_embedding",
    "pre_norm",
    "final_norm",
    "norm_eps",
    "activation",
    "value_bias",
    "norm",
    "query_key_norm",
    "residual_scalars",
    "value_residual",
    "output_bias",
    "positions",
    "num_distances",
    "share_biases",
    "same_length",
    "clamp_len",
)
"""Settings of the model section that have the same names in config.json."""


class Written(NamedTuple):
    """Result of an export that includes the model's code."""

    difference: float | None
    """Largest difference between the exported model's and the bundle's log-probabilities, in nats. It is None if
    transformers 5 is not installed."""
    has_tokenizer: bool
    """True if transformers can load the exported tokenizer."""


def export_huggingface_code(out: Path, bundle: Bundle) -> Written:
    """Write a model, its tokenizer and the code that runs it to the folder `out`. transformers can then load it.

    Raises ConfigError if the model has absolute positions or a plugin's positions. Raises CheckpointError if the losses
    of the probe or the log-probabilities of the model in transformers differ too much, or if the folder cannot be
    written.
    """
    section = bundle.section
    require_causal(section, where="the model")
    if not section.scheme.uses_memory:
        raise ConfigError(
            f"a model with {section.positions} positions has no memory, but the exported code needs a memory. Export a "
            "bundle."
        )
    if owner_of(SCHEMES, section.positions) is not None:
        raise ConfigError(
            f"model.positions={section.positions!r} comes from a plugin, which the exported code does not contain. "
            f"Export a bundle."
        )
    prove(bundle, bundle.model, bundle.dtype, where=str(out))
    with new_folder(out, kind=ArtifactKind.HUGGINGFACE_CODE) as folder:
        for name in MODULES:
            shutil.copyfile(SOURCE / name, folder / name)
        end_of_text = bundle.tokenizer.end_of_text
        ids = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
        write_json(folder / "config.json", {**_config(bundle), **ids})
        write_json(folder / "generation_config.json", {**ids, "pad_token_id": end_of_text})
        weights_path = folder / "model.safetensors"
        weights = {name: parameter.detach().contiguous() for name, parameter in bundle.model.named_parameters()}
        write_tensors(weights_path, weights, metadata={"format": "pt"})
        has_tokenizer = write_tokenizers(folder, bundle)
        if has_tokenizer:
            write_json(folder / "tokenizer_config.json", _tokenizer_config(bundle))
        difference = _difference(folder, bundle)
        largest_loss = float(bundle.probe["losses"].max())
        tolerance = probe_tolerance({bundle.dtype}, largest_loss=largest_loss)
        if difference is not None and not difference <= tolerance:
            raise CheckpointError(
                f"log-probabilities in transformers differ from the bundle's by {difference:.3g} nats. Report this "
                "defect."
            )
        description = bundle.described(dtype=bundle.dtype, num_bytes=weights_path.stat().st_size)
        write_readme(folder, description, ArtifactKind.HUGGINGFACE_CODE)
    return Written(difference, has_tokenizer)


def _config(bundle: Bundle) -> dict[str, Any]:
    """Return the content of config.json, except the ids of special tokens."""
    section = bundle.section
    settings = section.model_dump(mode="json")
    same_settings = {name: settings[name] for name in SAME_NAMES}
    generation_memory_len = bundle.memory_len
    if section.same_length == "off":  # as in `txl generate`
        generation_memory_len = max(bundle.memory_len, bundle.segment_len - 1)
    return {
        "model_type": "txl",
        "architectures": ["TxlForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_txl.TxlConfig",
            "AutoModelForCausalLM": "modeling_txl.TxlForCausalLM",
        },
        "dtype": str(DTYPES[bundle.dtype]).removeprefix("torch."),
        "vocab_size": bundle.model.vocab_size,
        **same_settings,
        "embed_width": section.embed_width_or_default(),
        "tie_weights_to_embedding": section.tie_weights,
        "tie_word_embeddings": False,
        "initializer_range": section.init_std,
        "segment_len": bundle.segment_len,
        "memory_len": bundle.memory_len,
        "generation_memory_len": generation_memory_len,
        "document_mask": bundle.document_mask,
    }


def _tokenizer_config(bundle: Bundle) -> dict[str, Any]:
    """Return the content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special_tokens_of(bundle.tokenizer),
        "padding_side": "left",
        "split_special_tokens": True,  # a special token that is spelled in a text is text
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }


@torch.no_grad()
def _difference(folder: Path, bundle: Bundle) -> float | None:
    """Return the largest difference between the log-probabilities of transformers' model and of the bundle, in nats.

    CHECKED_SEGMENTS segments are compared. Returns None if transformers is missing, or if the installed version lacks
    features that the code needs.
    """
    try:
        from txl_dist.convert.huggingface_code.modeling_txl import TxlForCausalLM
    except ImportError:
        return None
    from transformers.utils import logging

    with _without_progress(logging):
        model: Any = TxlForCausalLM.from_pretrained(folder, dtype=DTYPES[bundle.dtype])
    model.eval()
    place_S = torch.arange(CHECKED_SEGMENTS * bundle.segment_len + 1)
    vocab_size = bundle.model.vocab_size
    tokens_S = (place_S * 7919 + 1) % vocab_size
    end_of_text = bundle.tokenizer.end_of_text
    if end_of_text is not None:
        # No end-of-text, because the exported code would begin a document there and `log_probabilities` would not.
        replacement = (end_of_text + 1) % vocab_size
        tokens_S = torch.where(tokens_S == end_of_text, replacement, tokens_S)
    tokens_1S = tokens_S[None]
    expected_1S = log_probabilities(
        bundle.model, tokens_1S, segment_len=bundle.segment_len, memory_len=bundle.memory_len
    )
    targets_1S = tokens_1S[:, 1:]
    log_p_1SV = model(tokens_1S[:, :-1]).logits
    log_p_1S = log_p_1SV.gather(2, targets_1S[..., None])[..., 0]
    return float((log_p_1S - expected_1S).abs().max())


@contextmanager
def _without_progress(logging: Any) -> Iterator[None]:
    """Hide the progress bars of transformers. The argument `logging` is the module `transformers.utils.logging`, which
    controls the progress bars."""
    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()
