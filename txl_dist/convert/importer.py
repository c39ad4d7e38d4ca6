"""`txl import`: a peer's weights into a bundle that scores, generates, exports, and can begin a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from txl_dist.config.load import Config, check_config
from txl_dist.config.schema import TrainSection
from txl_dist.convert.checks import Imported, read_json
from txl_dist.convert.huggingface import import_huggingface
from txl_dist.convert.labml import import_labml
from txl_dist.convert.nvidia import import_nvidia
from txl_dist.convert.original import import_original
from txl_dist.convert.vocabulary import identity_tokenizer, read_vocabulary
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.inference.bundle import Package, network_of, write_bundle
from txl_dist.inference.probe import probe_of

Format = Literal["original", "nvidia", "huggingface", "labml"]


class Reader(Protocol):
    """Reads a file or folder; `told` are settings under the peer's names. Raises TxlError."""

    def __call__(self, path: Path, *, told: dict[str, Any]) -> Imported:
        """The model in it."""


READERS: dict[Format, Reader] = {
    "original": import_original,
    "nvidia": import_nvidia,
    "huggingface": import_huggingface,
    "labml": import_labml,
}


class Summary(NamedTuple):
    """What an import made."""

    num_parameters: int
    vocab_size: int
    has_vocabulary: bool
    """False: none was found, and text is ids in decimal."""
    segment_len: int
    memory_len: int


def import_model(
    path: Path,
    out: Path,
    *,
    format: Format,
    settings: Path | None = None,
    vocab: Path | None = None,
    segment_len: int = 0,
    memory_len: int = -1,
    dtype: str = "fp32",
) -> Summary:
    """Read a peer's file or folder and write a bundle to `out`.

    `settings` is a JSON object under the peer's own names for what its file does not tell. `segment_len` 0 and
    `memory_len` -1 take what file or settings say. Raises CheckpointError, DataError or ConfigError; runs no code of
    the file.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist. Name the file or folder with the weights.")
    found = READERS[format](path, told=read_json(settings))
    tokenizer = found.tokenizer
    if vocab is not None:
        tokenizer = read_vocabulary(vocab, vocab_size=found.vocab_size)
    segment_len, memory_len = _lengths(found, segment_len=segment_len, memory_len=memory_len, where=path)
    # A whole configuration, so that contradictions are found by the rules that hold for training.
    check_config(Config(model=found.model, train=TrainSection(segment_len=segment_len, memory_len=memory_len)))
    network = network_of(found.model, vocab_size=found.vocab_size, weights=found.weights, dtype="fp32", where=str(path))
    package = Package(
        section=found.model,
        weights=found.weights,
        tokenizer=tokenizer or identity_tokenizer(found.vocab_size),
        segment_len=segment_len,
        memory_len=memory_len,
        source={"imported": format, "file": path.name},
        probe=probe_of(network, memory_len=memory_len),
    )
    write_bundle(out, package, dtype=dtype)
    return Summary(
        num_parameters=sum(parameter.numel() for parameter in network.parameters()),
        vocab_size=found.vocab_size,
        has_vocabulary=tokenizer is not None,
        segment_len=segment_len,
        memory_len=memory_len,
    )


def _lengths(found: Imported, *, segment_len: int, memory_len: int, where: Path) -> tuple[int, int]:
    if not found.model.scheme.uses_memory and memory_len < 0:
        memory_len = 0  # whatever the file says: the original fails with a memory there
    if segment_len < 0 or memory_len < -1:
        raise ConfigError(f"a segment of {segment_len} or a memory of {memory_len} tokens cannot be. Correct it.")
    memory_len = found.memory_len if memory_len < 0 else memory_len
    segment_len = segment_len or found.segment_len
    unknown = ["--memory-len"] * (memory_len < 0) + ["--segment-len"] * (segment_len <= 0)
    if unknown:
        raise ConfigError(f"{where} does not tell the lengths that the model works with. Give {' and '.join(unknown)}.")
    return segment_len, memory_len
