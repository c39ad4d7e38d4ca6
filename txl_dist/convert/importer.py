"""`txl import`: write another program's weights as a bundle, for scoring, generation, export and training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from txl_dist.config.load import Config, check_config
from txl_dist.config.schema import TargetLengths, TrainSection
from txl_dist.convert.huggingface import import_huggingface
from txl_dist.convert.import_checks import Imported, read_peer_settings
from txl_dist.convert.labml import import_labml
from txl_dist.convert.nvidia import import_nvidia
from txl_dist.convert.original import import_original
from txl_dist.convert.vocabulary import identity_tokenizer, read_vocabulary
from txl_dist.convert.xlnet import import_xlnet
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.inference.bundle import Package, network_of, write_bundle
from txl_dist.inference.probe import probe_of

Format = Literal["original", "nvidia", "huggingface", "labml", "xlnet"]


class Reader(Protocol):
    """Function that reads a model from a file or folder in one program's format."""

    def __call__(self, path: Path, *, user_settings: dict[str, Any]) -> Imported:
        """Read the model. `user_settings` are the user's settings, by the other program's names.

        Raises a TxlError if the file cannot be read or does not fit the format.
        """


READERS: dict[Format, Reader] = {
    "original": import_original,
    "nvidia": import_nvidia,
    "huggingface": import_huggingface,
    "labml": import_labml,
    "xlnet": import_xlnet,
}


class Summary(NamedTuple):
    """Facts about an imported model, which `txl import` prints."""

    num_parameters: int
    vocab_size: int
    has_vocabulary: bool
    """True if a vocabulary was found. If it is False, texts are written as ids in decimal."""
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
    """Read another program's file or folder, and write a bundle to `out`. Code in the file is not run.

    Raises CheckpointError if the model cannot be read or written, DataError if the vocabulary cannot be read, and
    ConfigError if a length is unknown.

    Args:
        settings: A JSON file with settings that the model file lacks, by the other program's names.
        vocab: A vocabulary file. It is used instead of the vocabulary in the model file.
        segment_len: Tokens per segment. If it is 0, the value is from the file or the settings.
        memory_len: Tokens of memory. If it is -1, the value is from the file or the settings.
        dtype: The type of the bundle's weights.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist. Name the file or folder with the weights.")
    imported = READERS[format](path, user_settings=read_peer_settings(settings))
    model = imported.model
    vocab_size = imported.vocab_size
    tokenizer = imported.tokenizer
    if vocab is not None:
        tokenizer = read_vocabulary(vocab, vocab_size=vocab_size)
    segment_len, memory_len = _lengths(imported, segment_len=segment_len, memory_len=memory_len, where=path)
    # A whole configuration, so that the rules for training find inconsistent settings.
    train = TrainSection(segment_len=segment_len, memory_len=memory_len)
    if model.any_order:
        train = train.model_copy(update={"objective": "permutation", "reuse_len": imported.reuse_len})
    check_config(Config(model=model, train=train))
    network = network_of(model, vocab_size=vocab_size, weights=imported.weights, dtype="fp32", where=str(path))
    package = Package(
        section=model,
        weights=imported.weights,
        tokenizer=tokenizer or identity_tokenizer(vocab_size),
        segment_len=segment_len,
        target_lengths=TargetLengths(reuse_len=imported.reuse_len),
        memory_len=memory_len,
        source={"imported": format, "file": path.name},
        probe=probe_of(network, memory_len=memory_len),
    )
    write_bundle(out, package, dtype=dtype)
    return Summary(
        num_parameters=sum(parameter.numel() for parameter in network.parameters()),
        vocab_size=vocab_size,
        has_vocabulary=tokenizer is not None,
        segment_len=segment_len,
        memory_len=memory_len,
    )


def _lengths(imported: Imported, *, segment_len: int, memory_len: int, where: Path) -> tuple[int, int]:
    """Return the segment length and the memory length. The user's values take precedence over the file's values.

    Raises ConfigError if a length is unknown.
    """
    if not imported.model.scheme.uses_memory and memory_len < 0:
        memory_len = 0  # even if the file gives a length: the original fails with a memory there
    if segment_len < 0 or memory_len < -1:
        raise ConfigError(
            f"a length is negative: {segment_len} tokens per segment and {memory_len} tokens of memory were given. "
            "Give lengths of 0 or more."
        )
    if memory_len < 0:
        memory_len = imported.memory_len
    if segment_len == 0:
        segment_len = imported.segment_len
    missing_flags = []
    if memory_len < 0:
        missing_flags.append("--memory-len")
    if segment_len <= 0:
        missing_flags.append("--segment-len")
    if missing_flags:
        flags = " and ".join(missing_flags)
        raise ConfigError(
            f"{where} does not contain the segment length or the memory length of the model. Give {flags}."
        )
    return segment_len, memory_len
