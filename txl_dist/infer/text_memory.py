"""What a model remembers of a text, as a value and as a file: a conversation or a shared prefix goes on from it without
being read again.

The file is safetensors: `key_value` [L, 2, N, S, H] and `document` [S] of the last S positions but one, oldest first,
`last`, the id of the token that follows them and is not read yet; in its metadata the fingerprints of the model and of
these tensors.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
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

    def save(self, path: str | Path) -> None:
        """Write the file; an older one is replaced, whole. Raises ConfigError if it cannot be written.

        So a device or a pipe of that name would be replaced too, and is refused.
        """
        if path_of(path).exists() and not path_of(path).is_file():
            raise ConfigError(f"{path} is no file that a memory could be written to. Choose another one.")
        tensors = {
            "key_value": self.past.key_value_L2NSH.cpu().contiguous(),
            "document": self.past.document_S.cpu().contiguous(),
            "last": torch.tensor([self.last]),
        }
        metadata = {"format_version": FORMAT_VERSION, "model": self.model, "content": _digest(tensors)}
        with explained(ConfigError, f"cannot write {path}", "Choose another file."):
            replace_file(path_of(path), save(tensors, metadata=metadata))


def load_memory(path: str | Path, model: TransformerXL, *, fingerprint: str) -> TextMemory:
    """A memory that this model made. Raises CheckpointError if the file is none, is damaged or is of another model."""
    again = "Make it again with --save-memory."
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format_version") != FORMAT_VERSION:
                raise CheckpointError(f"{path} is no memory of a text. {again}")
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as a memory of a text: {error}. {again}") from error
    if metadata.get("model") != fingerprint:
        raise CheckpointError(
            f"{path} is a memory of another model: another one reads its numbers as something else. Use the model that "
            f"made it, or give the text. {again}"
        )
    if metadata.get("content") != _digest(tensors) or tensors.keys() != {"key_value", "document", "last"}:
        raise CheckpointError(f"{path} is damaged: its content is not what was written. {again}")
    device = model.embedding.weight(0).device
    past = Past(tensors["key_value"].to(device), tensors["document"].to(device))
    return TextMemory(past, int(tensors["last"]), fingerprint)


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
