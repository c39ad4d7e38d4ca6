"""What a model remembers of a text, as a value and as a file: a conversation or a shared prefix goes on from it without
being read again.

The file is safetensors: `key_value` [L, 2, N, S, H] and `document` [S] of the last S positions but one, oldest first,
`last`, the id of the token that follows them and is not read yet; in its metadata the fingerprints of the model and of
these tensors.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from txl_dist.errors import CheckpointError, ConfigError, explained
from txl_dist.files import path_of, replace_file
from txl_dist.infer.cached import Past
from txl_dist.model.transformer_xl import TransformerXL

FORMAT_VERSION = "1"


@dataclass(frozen=True)
class TextMemory:
    """What is remembered of a text: all but its last token, and that one."""

    past: Past
    last: int
    model: str
    """Fingerprint of the model whose it is (`fingerprint_of`)."""

    def __len__(self) -> int:
        """Tokens that are remembered."""
        return self.past.document_S.shape[0] + 1

    @property
    def num_bytes(self) -> int:
        """Of its tensors."""
        return self.past.key_value_L2NSH.nbytes + self.past.document_S.nbytes

    def save(self, path: str | Path) -> None:
        """Write the file; an older one is replaced, whole. Raises ConfigError if it cannot be written.

        So a device or a pipe of that name would be replaced too, and is refused.
        """
        if path_of(path).exists() and not path_of(path).is_file():
            raise ConfigError(f"{path} is no file that a memory could be written to. Choose another one.")
        with explained(ConfigError, f"cannot write {path}", "Choose another file."):
            replace_file(path_of(path), self.to_bytes())

    def to_bytes(self) -> bytes:
        """What the file holds."""
        tensors = {
            "key_value": self.past.key_value_L2NSH.cpu().contiguous(),
            "document": self.past.document_S.cpu().contiguous(),
            "last": torch.tensor([self.last]),
        }
        metadata = {"format_version": FORMAT_VERSION, "model": self.model, "content": _digest(tensors)}
        return save(tensors, metadata=metadata)


def load_memory(path: str | Path, model: TransformerXL, *, fingerprint: str) -> TextMemory:
    """A memory that this model made. Raises CheckpointError if the file is none, is damaged or is of another model."""
    with explained(CheckpointError, f"{path} cannot be read as a memory of a text", _AGAIN):
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
        raise CheckpointError(f"{called} is no memory of a text. {_AGAIN}")
    if metadata.get("model") != fingerprint:
        raise CheckpointError(
            f"{called} is a memory of another model: another one reads its numbers as something else. Use the model "
            f"that made it, or give the text. {_AGAIN}"
        )
    if not _fits(tensors, model) or metadata.get("content") != _digest(tensors):
        raise CheckpointError(f"{called} is damaged: its content is not what was written. {_AGAIN}")
    device = model.embedding.weight(0).device
    past = Past(tensors["key_value"].to(device), tensors["document"].to(device))
    return TextMemory(past, int(tensors["last"]), fingerprint)


_AGAIN = "Make it again from its text, with --save-memory or by a server."


def _fits(tensors: dict[str, Tensor], model: TransformerXL) -> bool:
    """Whether these are the tensors of a memory of this model: a file may come from anybody, digests and all."""
    if tensors.keys() != {"key_value", "document", "last"}:
        return False
    key_value, document, last, section = (*(tensors[name] for name in ("key_value", "document", "last")), model.section)
    num_positions = document.shape[0] if document.dim() == 1 else -1
    return (
        key_value.shape == (section.num_layers, 2, section.num_heads, num_positions, section.head_width)
        and key_value.dtype == model.embedding.weight(0).dtype
        and bool(key_value.isfinite().all())
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
