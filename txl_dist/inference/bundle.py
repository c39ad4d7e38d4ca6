"""The inference bundle: a folder with a trained model, and with a probe by which each load checks the weights.

    model.safetensors    weights, each tied tensor once (for type int8 also one scale per matrix row)
    config.json          model settings, vocabulary size, type, memory and segment length, origin of the weights
    tokenizer.json       tokenizer between text and ids
    train.toml           settings to continue training: txl train BUNDLE/train.toml --init BUNDLE --data.path ...
    probe.safetensors    tokens, and their losses as the training engine computed them. Each load of the
                         bundle computes the losses again and compares.
    card.json            facts about the training, and facts that the user stated (module `card`)
    README.md            model card for people, made from card.json (people can edit it)
    MANIFEST.json        bytes and sha256 of each file

Bundles of older versions of txl_dist have no card.json and no README.md. Loading a bundle needs neither DeepSpeed nor a
launcher.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from txl_dist.artifacts import ArtifactKind, detect_artifact
from txl_dist.config.registry import Plugin, owner_of, require_plugins
from txl_dist.config.renamed import keys_in_new_names
from txl_dist.config.schema import SCHEMES, Len, ModelSection, PositiveLen, TargetLengths
from txl_dist.console.logging import logger
from txl_dist.errors import CheckpointError, ConfigError, TxlError
from txl_dist.inference.card import CARD, NOTHING_STATED, Card, Model, read_card, write_card, write_readme
from txl_dist.inference.disk_offload import DiskOffloadedXL
from txl_dist.inference.options import InferencePrecision
from txl_dist.inference.probe import probe_error
from txl_dist.inference.weights import Weights, copy_in_pieces, stored_weights, write_weights
from txl_dist.io.files import parse_object, read_bytes, typed, write_bytes
from txl_dist.io.hub import local_model
from txl_dist.io.manifest import check_folder, describe_file, files_of, replace_folder, write_manifest
from txl_dist.io.tensor_files import write_tensors
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.tokenizers.base import Tokenizer
from txl_dist.tokenizers.tokenizer import KINDS, load_tokenizer

WEIGHTS = "model.safetensors"
FORMAT_VERSIONS = (1, 2, 3, 4, 5)
"""Format versions of bundles that txl_dist reads. Version 2 added int8 weights. Version 3 added layers with memories of
different lengths. Version 4 added the setting `document_mask`. Version 5 added models that predict in any order. Models
that predict the next token are written as version 4."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Number types in which a network can run. The network of an int8 bundle runs in fp32."""
PROBE_TOLERANCE = {"fp32": 1e-4, "bf16": 0.02, "fp16": 0.005, "int8": 0.02}
"""Largest allowed difference between recorded and computed losses of the probe's tokens, by number type.

The losses were recorded in one type, and the weights can be stored in another type. The larger of the two tolerances
applies. The value of fp32 is in nats. The other values are shares of the largest loss on the probe, because half
precisions round relative to the loss. A largest loss below 5 nats counts as 5 nats. Measured shares are 0.02 % to 0.8 %
for bf16 and for int8, on 14 kinds of random networks. On three trained networks the shares are 0.1 % to 0.3 %.
"""


class _Content(BaseModel):
    """Content of config.json in a bundle. The key `begins_documents` is missing in bundles of old versions. Only models
    that predict in any order have the keys of `TargetLengths`."""

    model_config = ConfigDict(strict=True)

    model: ModelSection
    vocab_size: Annotated[int, Field(gt=0, le=1 << 32)]
    dtype: Literal["fp32", "bf16", "fp16", "int8"]
    probe_dtype: Literal["fp32", "bf16", "fp16", "int8"]
    segment_len: PositiveLen
    reuse_len: Len = 0
    predicted_len: Len = 0
    order_len: Len = 0
    longest_span: PositiveLen = 5
    span_context: PositiveLen = 6
    memory_len: Len
    memory_lens: tuple[Len, ...] = ()
    document_mask: bool
    begins_documents: bool | None = None
    source: dict[str, Any]
    plugins: tuple[Plugin, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Package:
    """Trained model with everything that is needed to use it, before its network is built.

    The export and the import of a model make a package. `write_bundle` writes a package as a bundle.
    """

    section: ModelSection
    """Settings of the model (section `model` of a config)."""
    weights: Weights
    """Weights by the names that txl_dist gives to parameters. A tensor that several parameters share is stored under
    the name of the first of these parameters, and can be stored under the other names too. A value can still be in a
    file. Such a value is read when it is used."""
    tokenizer: Tokenizer
    segment_len: int
    """Length of a segment in training, in tokens."""
    target_lengths: TargetLengths = dataclasses.field(default_factory=TargetLengths)
    """For models that predict in any order: the settings by which training chose the tokens to predict."""
    memory_len: int
    """Length of the longest memory of any layer, in tokens."""
    memory_lens: tuple[int, ...] = ()
    """Memory length of each layer if the layers differ, else empty."""
    document_mask: bool = False
    """Whether training used document masks, so that a token sees only its own document."""
    begins_documents: bool = True
    """Whether the model was trained to predict a document's first token from an end-of-text token. It is False for a
    vocabulary without an end-of-text token, and for models that version 0.1 trained with document masks."""
    source: dict[str, Any]
    """Origin of the weights: run, step and precision, or the file that was imported."""
    probe: dict[str, Tensor]
    """Tokens and the losses that the training engine computed for them: `tokens` [1, S] and `losses` [1, S - 1] in
    nats."""
    probe_dtype: str = "fp32"
    """Number type in which the losses of the probe were computed."""
    card: Card = NOTHING_STATED
    """Facts about the training, and facts that the user stated."""

    def described(self, *, dtype: str, num_bytes: int) -> Model:
        """Return the facts for a model card.

        `dtype` and `num_bytes` describe the file of the weights: its type and size.
        """
        # Tied tensors may be in `weights` under each of their names: the network has each once.
        with torch.device("meta"):
            network = TransformerXL(self.section, vocab_size=self.tokenizer.vocab_size)
        return Model(
            section=self.section,
            vocab_size=self.tokenizer.vocab_size,
            segment_len=self.segment_len,
            memory_len=self.memory_len,
            memory_lens=self.memory_lens,
            document_mask=self.document_mask,
            dtype=dtype,
            tokenizer=self.tokenizer.kind,
            num_parameters=sum(parameter.numel() for parameter in network.parameters()),
            num_bytes=num_bytes,
            source=self.source,
            card=self.card,
        )

    def open(self, dtype: str = "fp32", *, device: str = "cpu", where: str) -> Bundle:
        """Build the network in the type `dtype` on `device`. Returns an open bundle: the network and this package's
        fields.

        `where` names the model in messages. Raises CheckpointError if weights and settings do not fit.
        """
        vocab_size = self.tokenizer.vocab_size
        network = network_of(
            self.section,
            vocab_size=vocab_size,
            weights=self.weights,
            dtype=dtype,
            memory_lens=self.memory_lens,
            where=where,
        )
        weights = dict(network.to(device).named_parameters())
        probe = {name: tensor.to(device) for name, tensor in self.probe.items()}
        return Bundle(**{**vars(self), "weights": weights, "probe": probe, "model": network, "dtype": dtype})

    def proven(self, dtype: str, *, where: str) -> float:
        """Check the weights on the probe, reading a few rows at a time. Returns the largest error, in nats.

        `dtype` is the type of the weights in their file. `where` names the model in messages. Raises CheckpointError if
        the error is larger than `probe_tolerance`.
        """
        vocab_size = self.tokenizer.vocab_size
        with _readable(where):
            _fitting(self.section, vocab_size=vocab_size, weights=self.weights, where=where)
            network = DiskOffloadedXL(
                self.section,
                vocab_size=vocab_size,
                weights=self.weights,
                dtype=_compute_type(dtype),
                memory_lens=self.memory_lens,
            )
            return prove(self, network, dtype, where=where)


@dataclass(frozen=True, kw_only=True)
class Bundle(Package):
    """Open bundle: settings, tokenizer and a network that is ready to run.

    `load_bundle` returns it. `inference.language_model` scores and generates text with it.
    """

    model: TransformerXL
    """Network in evaluation mode, with the weights."""
    dtype: str
    """Number type of the weights: fp32, bf16, fp16 or int8."""

    @property
    def precision(self) -> str:
        """Number type in which the network computes. Weights in int8 are used as fp32."""
        if self.dtype == "int8":
            return "fp32"
        return self.dtype

    def in_precision(self, precision: InferencePrecision, *, device: str = "cpu", where: str) -> Bundle:
        """Return the bundle with a network that computes in `precision` on `device`. `where` names the model in
        messages."""
        if precision in ("stored", self.precision):
            return self
        return self.open(precision, device=device, where=where)


def write_bundle(folder: Path, package: Package, *, dtype: str = "fp32") -> float:
    """Write a model as a bundle, read it back, and return its largest error on the probe, in nats.

    `dtype` is the type of the weights in the file: fp32, bf16, fp16 or int8. A bundle that is already in the folder is
    replaced. Weights are read a few MiB at a time and the probe runs layer by layer, so the model need not fit in
    memory. Raises CheckpointError if the weights do not fit, if the error is larger than `probe_tolerance`, or if the
    folder cannot be written.
    """
    folder = folder.resolve()
    if (
        folder.exists()
        and detect_artifact(folder) is not ArtifactKind.BUNDLE
        and not (folder.is_dir() and not any(folder.iterdir()))
    ):
        raise CheckpointError(f"{folder} exists and is not a bundle. Choose another output folder.")
    temporary = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")
    lengths: dict[str, Any] = {"segment_len": package.segment_len, "memory_len": package.memory_len}
    if package.memory_lens:
        lengths["memory_lens"] = list(package.memory_lens)
    if package.section.any_order:
        lengths |= package.target_lengths._asdict()
    model = package.section.model_dump(mode="json")
    version = FORMAT_VERSIONS[-1]
    if not package.section.any_order:  # older versions of txl_dist can read it
        version = 4
        for name in ("any_order", "segment_terms"):
            del model[name]
    vocab_size = package.tokenizer.vocab_size
    content = {
        "format_version": version,
        "model": model,
        "vocab_size": vocab_size,
        "dtype": dtype,
        "probe_dtype": package.probe_dtype,
        **lengths,
        "document_mask": package.document_mask,
        "begins_documents": package.begins_documents,
        "tokenizer_fingerprint": package.tokenizer.fingerprint,
        "source": package.source,
    }
    plugins = _plugins_of(package)
    if plugins:
        content["plugins"] = [plugin._asdict() for plugin in plugins]
    names = _fitting(package.section, vocab_size=vocab_size, weights=package.weights, where=str(folder))
    try:
        temporary.mkdir(parents=True)
        weights = {name: package.weights[name] for name in names}
        write_weights(temporary / WEIGHTS, weights, dtype=dtype)
        write_tensors(temporary / "probe.safetensors", package.probe)
        write_bytes(temporary / "config.json", json.dumps(content, indent=1).encode() + b"\n")
        package.tokenizer.save(temporary / "tokenizer.json")
        objective = {"objective": "permutation"} if package.section.any_order else {}
        train = {"data": {"document_mask": package.document_mask}, "model": model, "train": lengths | objective}
        write_bytes(temporary / "train.toml", tomli_w.dumps(train).encode())
        write_card(temporary, package.card)
        described = package.described(dtype=dtype, num_bytes=(temporary / WEIGHTS).stat().st_size)
        write_readme(temporary, described, ArtifactKind.BUNDLE)
        write_manifest(temporary, {name: describe_file(temporary / name) for name in files_of(temporary)})
        check_folder(temporary, remedy="Choose a folder on another disk.")
        _Content.model_validate_json(read_bytes(temporary / "config.json"))
        written = dataclasses.replace(package, weights=stored_weights(temporary / WEIGHTS))
        error = written.proven(dtype, where=str(folder))
        replace_folder(temporary, folder)
    except (OSError, SafetensorError) as problem:
        raise CheckpointError(f"cannot write {folder}: {problem}. Choose a folder that can be written.") from problem
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return error


def _plugins_of(package: Package) -> list[Plugin]:
    """List the plugins that a model needs, for its positions and for its tokenizer."""
    owners = owner_of(SCHEMES, package.section.positions), owner_of(KINDS, package.tokenizer.kind)
    return list(dict.fromkeys(owner for owner in owners if owner is not None))


def load_bundle(path: str | Path, *, device: str = "cpu") -> Bundle:
    """Load a bundle from a folder or an hf:// address, and check its hashes, its shapes and its probe (tokens with
    recorded losses).

    Raises CheckpointError for a bundle that fails a check, and ConfigError for a device that does not exist.
    """
    folder = local_model(path)
    device = check_device(device)
    package, dtype = read_bundle(folder)
    with _readable(folder):
        bundle = package.open(dtype, device=device, where=str(folder))
        prove(bundle, bundle.model, dtype, where=str(folder))
    return bundle


def read_bundle(folder: Path) -> tuple[Package, str]:
    """Check the hashes of a bundle's files, and return (the bundle's content, the type of its weights).

    The weights stay in their file until they are used. Raises CheckpointError if a file is missing or damaged, or has
    an unknown format version.
    """
    if detect_artifact(folder) is not ArtifactKind.BUNDLE:
        raise CheckpointError(f"{folder} is not a bundle. Make a bundle with `txl export RUN {folder}`.")
    check_folder(folder, remedy="Copy the bundle again, or export it again.")
    with _readable(folder):
        data = read_bytes(folder / "config.json")
        values = keys_in_new_names(parse_object(data), of="bundle")
        version = values["format_version"]
        if version not in FORMAT_VERSIONS:
            raise CheckpointError(
                f"{folder} has format version {version}, but this version of txl_dist reads "
                f"{' and '.join(map(str, FORMAT_VERSIONS))}. "
                "Use the version of txl_dist that wrote the bundle."
            )
        recorded = values.get("plugins", [])
        for change in require_plugins([typed(Plugin, one)._asdict() for one in recorded], where=str(folder)):
            logger.warning(change)
        content = _Content.model_validate_json(json.dumps(values))
        package = Package(
            section=content.model,
            weights=stored_weights(folder / WEIGHTS),
            tokenizer=load_tokenizer(folder / "tokenizer.json"),
            segment_len=content.segment_len,
            target_lengths=TargetLengths(*(getattr(content, name) for name in TargetLengths._fields)),
            memory_len=content.memory_len,
            memory_lens=content.memory_lens,
            document_mask=content.document_mask,
            begins_documents=(
                not content.document_mask if content.begins_documents is None else content.begins_documents
            ),
            source=content.source,
            probe=load_file(folder / "probe.safetensors"),
            probe_dtype=content.probe_dtype,
            card=read_card(folder),
        )
        return package, content.dtype


@contextmanager
def _readable(where: Path | str) -> Iterator[None]:
    """Turn an error in the block into a CheckpointError that names the bundle `where`."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        if error.title == Card.__name__:
            file = CARD
        else:
            file = "config.json"
        raise CheckpointError(
            f"{where} cannot be read: {file}, {place:.80}: {first['msg']}. Export the bundle again."
        ) from error
    except (OSError, ValueError, KeyError, SafetensorError, RuntimeError) as error:  # the last: not enough memory
        if isinstance(error, TxlError):
            raise
        raise CheckpointError(f"{where} cannot be read: {error!r}. Export the bundle again.") from error


def prove(package: Package, network: TransformerXL, dtype: str, *, where: str) -> float:
    """Return the largest error of a network on a package's probe, in nats, as `probe_error` defines it.

    `dtype` is the type of the network's weights in their file. Raises CheckpointError if the error is larger than
    `probe_tolerance`, because then the weights are not the trained ones. The message names the model `where`.
    """
    tolerance = probe_tolerance({dtype, package.probe_dtype}, largest_loss=float(package.probe["losses"].max()))
    worst = probe_error(network, package.probe, memory_len=package.memory_len)
    if not worst <= tolerance:
        raise CheckpointError(
            f"{where} does not reproduce its probe (tokens with recorded losses). A log-probability differs by "
            f"{worst:.3g} nats, more than {tolerance}. Export the bundle again. If the difference remains, report a "
            "defect."
        )
    return worst


def require_causal(model: ModelSection, *, where: str) -> None:
    """Raise ConfigError for a model that predicts in any order (XLNet), which cannot predict the next token.

    The message names the model `where`.
    """
    if model.any_order:
        raise ConfigError(
            f"{where} predicts tokens in any order (model.any_order), but only a model that predicts the next token "
            "can be used here. A model that predicts in any order can be scored with `txl evaluate`, and exported with "
            "`txl export` as a bundle or as an XLNet model of transformers."
        )


def check_device(device: str) -> str:
    """Check that tensors can be made on a device, and return its name as torch spells it.

    Raises ConfigError for a device that does not exist, or that cannot hold tensors.
    """
    try:
        found = torch.device(device)
        torch.zeros(1, device=found).tolist()
    except (RuntimeError, AssertionError, TypeError, ValueError, ImportError) as error:
        raise ConfigError(
            f"device {device!r:.200} cannot be used here: {str(error).splitlines()[0]:.80}. Choose cpu. On a "
            f"machine with a GPU and its driver, cuda, cuda:0, cuda:1 ... can be used too."
        ) from error
    return str(found)


def probe_tolerance(dtypes: set[str], *, largest_loss: float) -> float:
    """Return the largest allowed difference on the probe, in nats, between results in these number types.

    `largest_loss` is the largest loss of the probe in nats. See `PROBE_TOLERANCE`.
    """
    scale = max(5.0, largest_loss)
    return max(PROBE_TOLERANCE[dtype] * (1.0 if dtype == "fp32" else scale) for dtype in dtypes)


def network_of(
    model: ModelSection,
    *,
    vocab_size: int,
    weights: Weights,
    dtype: str,
    where: str,
    memory_lens: Sequence[int] = (),
) -> TransformerXL:
    """Build a network in evaluation mode with the given weights, ready to run.

    `dtype` is the type of the weights in their file. `memory_lens` is each layer's memory length if the layers differ.
    Raises CheckpointError if the weights do not fit the model. The message names the model `where`.
    """
    _fitting(model, vocab_size=vocab_size, weights=weights, where=where)
    with torch.random.fork_rng(devices=[]):  # initial weights are drawn, and overwritten: leave no trace of that
        network = TransformerXL(model, vocab_size=vocab_size, memory_lens=memory_lens).to(_compute_type(dtype))
    copy_weights(network, weights)
    return network.eval()


def copy_weights(network: TransformerXL, weights: Weights) -> None:
    """Overwrite every parameter of a network with the given weights, each cast to the parameter's type.

    A tensor that several parameters share must be in `weights` under the name of the first of these parameters.
    """
    for name, parameter in network.named_parameters():
        copy_in_pieces(parameter, weights[name])


def _compute_type(dtype: str) -> torch.dtype:
    """Return the number type in which a network runs, for a bundle whose weights have the type `dtype`."""
    return DTYPES.get(dtype, torch.float32)


def _fitting(model: ModelSection, *, vocab_size: int, weights: Weights, where: str) -> list[str]:
    """Check that weights fit a model, and return the names of the model's parameters.

    Raises CheckpointError if a weight is missing, has another shape, or is not a parameter.
    """
    if len(weights) < model.num_layers or not 0 < vocab_size <= 1 << 32:  # before time and memory are spent on it
        raise CheckpointError(
            f"{where}: the settings describe a model of {model.num_layers} layers and {vocab_size} token ids, but the "
            f"{len(weights)} tensors belong to another model. Use the settings that belong to the weights."
        )
    with torch.device("meta"):
        network = TransformerXL(model, vocab_size=vocab_size)
    parameters = dict(network.named_parameters())
    missing = sorted(parameters.keys() - weights.keys())
    surplus = sorted(weights.keys() - network.state_dict().keys())
    wrong = [
        f"{name} is {tuple(weights[name].shape)} instead of {tuple(parameter.shape)}"
        for name, parameter in parameters.items()
        if name in weights and weights[name].shape != parameter.shape
    ]
    if missing or surplus or wrong:
        raise CheckpointError(
            f"{where}: the weights do not fit the model. Missing tensors: {missing[:3]}. Unexpected tensors: "
            f"{surplus[:3]}. Wrong shapes: {wrong[:3]}. "
            "Use the settings that belong to the weights."
        )
    return list(parameters)
