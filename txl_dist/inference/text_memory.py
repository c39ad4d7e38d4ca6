"""What a model remembers of a text, as a value and as a file: a conversation or a shared prefix goes on from it without
being read again.

The file is safetensors: `key_value` [L, 2, N, S, H] (`key_value.0` [2, N, S_0, H], `key_value.1` ... where the layers
remember differently) and `document` [S] of the last S positions but one, oldest first,
`last`, the id of the token that follows them and is not read yet; in its metadata the fingerprints of the model and of
these tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from txl_dist.errors import CheckpointError, ConfigError, translate_errors
from txl_dist.inference.kv_cache import CacheState
from txl_dist.io.files import atomic_replace, path_of
from txl_dist.model.transformer_xl import TransformerXL

FORMAT_VERSION = "1"


@dataclass(frozen=True)
class TextMemory:
    """What is remembered of a text: all but its last token, and that one."""

    past: CacheState
    last: int
    model: str
    """Fingerprint of the model whose it is (`fingerprint_of`)."""

    def __len__(self) -> int:
        """Tokens that are remembered."""
        return self.past.document_S.shape[0] + 1

    @property
    def num_bytes(self) -> int:
        """Of its tensors."""
        return sum(one.nbytes for one in self.past.key_values) + self.past.document_S.nbytes

    def save(self, path: str | Path) -> None:
        """Write the file; an older one is replaced, whole. Raises ConfigError if it cannot be written.

        So a device or a pipe of that name would be replaced too, and is refused.
        """
        if path_of(path).exists() and not path_of(path).is_file():
            raise ConfigError(f"{path} is not a file that a memory could be written to. Choose another one.")
        with translate_errors(ConfigError, f"cannot write {path}", "Choose another file."):
            atomic_replace(path_of(path), self.to_bytes())

    def to_bytes(self) -> bytes:
        """What the file holds."""
        tensors = {
            **_stored([one.cpu() for one in self.past.key_values]),
            "document": self.past.document_S.cpu().contiguous(),
            "last": torch.tensor([self.last]),
        }
        metadata = {"format_version": FORMAT_VERSION, "model": self.model, "content": _digest(tensors)}
        return save(tensors, metadata=metadata)


def load_memory(path: str | Path, model: TransformerXL, *, fingerprint: str) -> TextMemory:
    """A memory that this model made. Raises CheckpointError if the file is none, is damaged or is of another model."""
    with translate_errors(CheckpointError, f"{path} cannot be read as a memory of a text", _AGAIN):
        data = Path(path).read_bytes()
    return read_memory(data, model, fingerprint=fingerprint, called=str(path))


def read_memory(data: bytes, model: TransformerXL, *, fingerprint: str, called: str) -> TextMemory:
    """As `load_memory`, of the content of a file, which messages call so."""
    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = header.get("__metadata__") or {}
    except (SafetensorError, ValueError, KeyError) as error:  # the last: a type of numbers that torch does not have
        raise CheckpointError(f"{called} cannot be read as a memory of a text: {error}. {_AGAIN}") from error
    if metadata.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(f"{called} is not a memory of a text. {_AGAIN}")
    if metadata.get("model") != fingerprint:
        raise CheckpointError(
            f"{called} is a memory of another model: another model cannot use its numbers. Use the model "
            f"that made it, or give the text. {_AGAIN}"
        )
    if not _fits(tensors, model) or metadata.get("content") != _digest(tensors):
        raise CheckpointError(f"{called} is damaged: its content differs from what was written. {_AGAIN}")
    device = model.embedding.weight(0).device
    key_values = tuple(key_value.to(device) for key_value in _layers_of(tensors))
    past = CacheState(key_values, tensors["document"].to(device))
    return TextMemory(past, int(tensors["last"]), fingerprint)


_AGAIN = "Make it again from its text, with --save-memory or by a server."


def _stored(key_values: Sequence[Tensor]) -> dict[str, Tensor]:
    """As one tensor where they are alike."""
    if len({one.shape for one in key_values}) == 1:
        return {"key_value": torch.stack(list(key_values))}
    return {f"key_value.{layer}": one.contiguous() for layer, one in enumerate(key_values)}


def _layers_of(tensors: dict[str, Tensor]) -> list[Tensor]:
    """key_value_2NSH of each layer, of a file's tensors."""
    if "key_value" in tensors:
        return list(tensors["key_value"])
    return [tensors[name] for layer in range(len(tensors)) if (name := f"key_value.{layer}") in tensors]


def _fits(tensors: dict[str, Tensor], model: TransformerXL) -> bool:
    """Whether these are the tensors of a memory of this model: a file may come from anybody, digests and all."""
    num_layers, num_heads, head_width = model.section.num_layers, model.section.num_heads, model.section.head_width
    per_layer = {f"key_value.{layer}" for layer in range(num_layers)}
    if not {"document", "last"} <= tensors.keys() or tensors.keys() - {"document", "last"} not in (
        {"key_value"},
        per_layer,
    ):
        return False
    if "key_value" in tensors and tensors["key_value"].dim() != 5:
        return False
    document, last, key_values = tensors["document"], tensors["last"], _layers_of(tensors)
    num_positions = document.shape[0] if document.dim() == 1 else -1
    dtype = model.embedding.weight(0).dtype
    return (
        len(key_values) == num_layers
        and all(one.dim() == 4 and one.shape[2] <= num_positions for one in key_values)
        and all(one.shape == (2, num_heads, one.shape[2], head_width) for one in key_values)
        and max(one.shape[2] for one in key_values) == num_positions
        and all(one.dtype == dtype and bool(one.isfinite().all()) for one in key_values)
        and document.dtype == last.dtype == torch.int64
        and last.shape == (1,)
        and 0 <= int(last) < model.vocab_size
    )


def fingerprint_of(model: TransformerXL) -> str:
    """sha256 of a model's settings and weights. It reads all of them: a second for some hundred million."""
    digest = hashlib.sha256(model.section.model_dump_json().encode())
    digest.update(_digest({name: parameter.detach().cpu() for name, parameter in model.named_parameters()}).encode())
    return digest.hexdigest()


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.numel():
            digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()
