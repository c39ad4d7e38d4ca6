"""Memory of a text, as a value and as a file. Generation continues from such a memory without reading the text again.

The file has the format safetensors, and these tensors:

    key_value   keys and values [L, 2, N, S, H], if all layers remember the same number of positions
    key_value.0 keys and values of layer 0 [2, N, S_0, H], if the numbers differ (then also key_value.1 ...)
    document    document number of each of the last S positions [S], oldest first
    last        id of the token after these positions, which has not been read yet

Shapes: L layers, N heads, S positions, H head width. The file's metadata hold the fingerprints of the model and of
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
    """Memory of a text, from which `LanguageModel` continues: keys and values of all tokens but the last, and the last
    token.
    """

    past: CacheState
    """Keys and values of all tokens but the last."""
    last: int
    """Id of the text's last token, which the model has not read yet."""
    model: str
    """Fingerprint of the model that made the memory (`fingerprint_of`)."""

    def __len__(self) -> int:
        """Return the number of tokens in the memory, including the last token."""
        return self.past.document_S.shape[0] + 1

    @property
    def num_bytes(self) -> int:
        """Size in bytes of all tensors of the memory."""
        size = self.past.document_S.nbytes
        for key_value in self.past.key_values:
            size += key_value.nbytes
        return size

    def save(self, path: str | Path) -> None:
        """Write the memory to a file. An older file is replaced only when the new file is complete.

        Raises ConfigError if the file cannot be written, or if the path is a device or a pipe.
        """
        target = path_of(path)
        if target.exists() and not target.is_file():
            raise ConfigError(f"{path} is not a file, so a memory cannot be written to it. Choose another path.")
        with translate_errors(ConfigError, f"cannot write {path}", "Choose another file."):
            atomic_replace(target, self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the bytes that `save` writes to a file."""
        key_values = [key_value.cpu() for key_value in self.past.key_values]
        tensors = _stored(key_values)
        tensors["document"] = self.past.document_S.cpu().contiguous()
        tensors["last"] = torch.tensor([self.last])
        metadata = {
            "format_version": FORMAT_VERSION,
            "model": self.model,
            "content": _digest(tensors),
        }
        return save(tensors, metadata=metadata)


def load_memory(path: str | Path, model: TransformerXL, *, fingerprint: str) -> TextMemory:
    """Read a memory from a file that `TextMemory.save` wrote with the same model.

    `fingerprint` is the fingerprint of the model, from `fingerprint_of`. Raises CheckpointError if the file is not a
    memory, is damaged, or was made by another model.
    """
    with translate_errors(CheckpointError, f"{path} cannot be read as a memory of a text", _AGAIN):
        data = Path(path).read_bytes()
    return read_memory(data, model, fingerprint=fingerprint, called=str(path))


def read_memory(data: bytes, model: TransformerXL, *, fingerprint: str, called: str) -> TextMemory:
    """Read a memory from the content of its file, as `load_memory` does. Messages name the content `called`."""
    try:
        tensors = load(data)
        header_len = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + header_len])
        metadata = header.get("__metadata__") or {}
    except (SafetensorError, ValueError, KeyError) as error:  # the last: a type of numbers that torch does not have
        raise CheckpointError(f"{called} cannot be read as a memory of a text: {error}. {_AGAIN}") from error
    if metadata.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(f"{called} is not a memory of a text. {_AGAIN}")
    if metadata.get("model") != fingerprint:
        raise CheckpointError(
            f"{called} belongs to another model, or to this model in another precision. A memory works only with the "
            f"model and the precision that made it. Use those if you have them. {_AGAIN}"
        )
    if not _fits(tensors, model) or metadata.get("content") != _digest(tensors):
        raise CheckpointError(f"{called} is damaged: its content differs from what was written. {_AGAIN}")
    device = model.embedding.weight(0).device
    key_values = tuple(key_value.to(device) for key_value in _layers_of(tensors))
    past = CacheState(key_values, tensors["document"].to(device))
    return TextMemory(past, int(tensors["last"]), fingerprint)


_AGAIN = "Make the memory again from its text, with --save-memory or with a server."
_OTHER_NAMES = {"document", "last"}


def _stored(key_values: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the tensors to store: one tensor if all layers have the same shape, else one tensor per layer."""
    shapes = {key_value.shape for key_value in key_values}
    if len(shapes) == 1:
        return {"key_value": torch.stack(list(key_values))}
    return {f"key_value.{layer}": key_value.contiguous() for layer, key_value in enumerate(key_values)}


def _layers_of(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Return key_value_2NSH of each layer from the tensors of a memory file."""
    if "key_value" in tensors:
        return list(tensors["key_value"])
    layers = []
    for layer in range(len(tensors)):
        key_value = tensors.get(f"key_value.{layer}")
        if key_value is not None:
            layers.append(key_value)
    return layers


def _fits(tensors: dict[str, Tensor], model: TransformerXL) -> bool:
    """Return whether these tensors can be a memory of this model, by their names, shapes and values.

    The file's hashes do not prove this, because anybody can write a file with matching hashes.
    """
    section = model.section
    names = tensors.keys() - _OTHER_NAMES
    names_per_layer = {f"key_value.{layer}" for layer in range(section.num_layers)}
    if not tensors.keys() >= _OTHER_NAMES or names not in ({"key_value"}, names_per_layer):
        return False
    if "key_value" in tensors and tensors["key_value"].dim() != 5:
        return False
    document = tensors["document"]
    last = tensors["last"]
    if document.dtype != torch.int64 or document.dim() != 1:
        return False
    if last.dtype != torch.int64 or last.shape != (1,) or not 0 <= int(last) < model.vocab_size:
        return False
    key_values = _layers_of(tensors)
    dtype = model.embedding.weight(0).dtype
    lens = []
    for key_value in key_values:
        if key_value.dim() != 4 or key_value.dtype != dtype or not bool(key_value.isfinite().all()):
            return False
        layer_len = key_value.shape[2]
        if key_value.shape != (2, section.num_heads, layer_len, section.head_width):
            return False
        lens.append(layer_len)
    return len(key_values) == section.num_layers and max(lens) == document.shape[0]


def fingerprint_of(model: TransformerXL) -> str:
    """Return the hash (sha256) of a model's settings and weights. The computation takes about 1 s per 100 million
    weights."""
    weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    digest = hashlib.sha256(model.section.model_dump_json().encode())
    digest.update(_digest(weights).encode())
    return digest.hexdigest()


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        header = f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        digest.update(header.encode())
        if tensor.numel():
            digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()
