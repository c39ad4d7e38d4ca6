"""Options of `txl evaluate` and `txl recl`. This module imports no torch, because the command line makes
flags from these options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from txl_dist.config.flags import Rule, check_bounds
from txl_dist.console.formatting import flag_of
from txl_dist.errors import ConfigError
from txl_dist.inference.options import InferencePrecision

_MOST = 1 << 20
"""Largest allowed number of tokens or lanes in an option. It is larger than any useful value, and smaller than the
limits of the settings."""
_Length = Annotated[int, Field(ge=0, le=_MOST)]
_LengthOrTrained = Annotated[int, Field(ge=-1, le=_MOST)]
_AS_TRAINED = f"0 to {_MOST:,} tokens. Without the flag, the value of training is used"


Prediction = Literal["random_order", "left_to_right", "pseudo_likelihood"]
"""Ways in which a model that predicts in any order (XLNet) is scored. See `evaluation.any_order`."""


class Protocol(NamedTuple):
    """Evaluation protocol of another program, for comparisons with its published results.

    A protocol sets the number of lanes (batch rows) and the way in which the text is cut. The page docs/evaluating.md
    describes the protocols.
    """

    num_lanes: int
    """Number of batch rows, or of random crops of the text, that the program evaluates in parallel."""
    same_length: Literal["off", "memory", "memory_and_self"]
    """Value of model.same_length that the program's published recipes use for evaluation with a memory."""
    cut: Literal["rows", "warm rows", "crops"]
    """Way in which the split is cut: rows, rows that start with the end of the previous row, or random crops."""
    source: str
    """Program and file that define the protocol, for people."""


PROTOCOLS = {
    "original": Protocol(10, "memory", "rows", "kimiyoung/transformer-xl, pytorch/eval.py"),
    "nvidia": Protocol(16, "memory_and_self", "warm rows", "NVIDIA/DeepLearningExamples, eval.py of Transformer-XL"),
    "nanogpt": Protocol(64, "off", "crops", "karpathy/nanoGPT, estimate_loss of train.py"),
}
NUM_CROP_BATCHES, CROP_SEED = 200, 1337
"""Number of batches and seed of the crops, as in nanoGPT. The random number generator is not nanoGPT's."""


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """Settings in which an evaluation differs from training. The defaults change nothing. Weights are never changed."""

    split: str = ""
    """Split to score. Default: data.eval_split of the run."""
    memory_len: Annotated[tuple[_LengthOrTrained, ...], Rule(_AS_TRAINED)] = (-1,)
    """Tokens of memory. -1: as in training. The model is scored once for each given value."""
    segment_len: Annotated[tuple[_Length, ...], Rule(_AS_TRAINED)] = (0,)
    """Tokens per forward pass. 0: as in training. All combinations with --memory-len and --clamp-len are scored."""
    num_lanes: Annotated[_Length, Rule(f"0 to {_MOST:,} lanes")] = 0
    """Lanes (batch rows) into which the split is cut. 0: the run's eval.num_lanes."""
    overlap_len: Annotated[_Length, Rule(f"0 to {_MOST:,} tokens")] = 0
    """Tokens before each segment that the model reads again as context, not scored. 0: the run's eval.overlap_len.
    Needs --memory-len 0."""
    clamp_len: Annotated[tuple[_LengthOrTrained, ...], Rule(_AS_TRAINED)] = (-1,)
    """Largest distance, in tokens, with its own encoding. -1: as in training. 0: no limit."""
    same_length: Literal["trained", "off", "memory", "memory_and_self"] = "trained"
    """Keys that a query sees, as for the setting model.same_length. trained: as in training."""
    zero_memory: bool = False
    """Start with a memory of zeros, which queries attend to (Hugging Face, TensorFlow)."""
    without_memory: bool = False
    """Also score without memory, to show the gain from memory."""
    precision: InferencePrecision = "stored"
    """Number type of the computation. stored: that of the bundle's weights (fp32 for a run and for int8)."""
    accuracy: bool = False
    """Also report the share of targets that are the most probable token, except with --adapt."""
    protocol: Literal["ours", "original", "nvidia", "nanogpt"] = "ours"
    """Program whose way of cutting the text and averaging losses is used, to compare with its published results."""

    prediction: tuple[Prediction, ...] = ("random_order",)
    """How an XLNet model predicts. random_order: as in training. left_to_right: every token, which gives bits per byte.
    pseudo_likelihood: one token in 64, each from all other tokens of its segment."""
    orders: Annotated[_Length, Rule(f"0 to {_MOST:,} orders")] = 0
    """Number of random orders in which an XLNet model predicts. 0: the run's eval.orders."""

    @property
    def peer(self) -> Protocol | None:
        """Protocol of the other program, or None for the protocol of txl_dist."""
        return PROTOCOLS.get(self.protocol)

    @property
    def num_combinations(self) -> int:
        """Number of evaluations, one for each combination of the given memory, segment and clamp lengths."""
        return len(self.memory_len) * len(self.segment_len) * len(self.clamp_len)

    def check(self, target: Path, *, is_bundle: bool, data: str | Path) -> None:
        """Check the options for a model. `data` is the path of the corpus, or empty if the user names no corpus.

        Raises ConfigError for a number out of range, for a flag that contradicts the protocol, and for a bundle without
        a corpus.
        """
        if is_bundle and not data:
            raise ConfigError(f"{target} is a bundle, and a bundle names no corpus. Name a corpus with --data.")
        for name, example in (("memory_len", "0 64 512"), ("segment_len", "16 64"), ("clamp_len", "0 400")):
            if not getattr(self, name):
                raise ConfigError(
                    f"{flag_of(name)} needs one or more values in tokens, each 0 or more, for instance {example}."
                )
        if not self.prediction:
            raise ConfigError("--prediction needs one or more values, for instance random_order left_to_right.")
        check_bounds(self)
        if self.peer is not None:
            self._check_protocol(self.peer)

    def check_causal(self, target: Path) -> None:
        """Raise ConfigError if an option needs a model that predicts in any order. The model at `target` predicts the
        next token."""
        given = {"--prediction": self.prediction != Overrides.prediction, "--orders": self.orders > 0}
        wrong = [flag for flag, is_given in given.items() if is_given]
        if wrong:
            raise ConfigError(
                f"{', '.join(wrong)} needs a model that predicts tokens in any order, but {target} predicts the next "
                f"token (model.any_order=False). Remove {', '.join(wrong)}."
            )

    def _check_protocol(self, peer: Protocol) -> None:
        is_crops = peer.cut == "crops"
        refused = {
            "--num-lanes": self.num_lanes and not is_crops,
            "--memory-len": is_crops and any(length > 0 for length in self.memory_len),
            "--overlap-len": self.overlap_len,
            "--same-length": self.same_length not in ("trained", "off", peer.same_length),
            "--zero-memory": self.zero_memory,
            "--without-memory": self.without_memory,
        }
        found = [flag for flag, is_given in refused.items() if is_given]
        if found:
            raise ConfigError(
                f"{', '.join(found)} cannot be given with --protocol {self.protocol}, because the protocol itself "
                f"sets these values (see {peer.source}). Remove {', '.join(found)}, or remove --protocol."
            )


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Files that an evaluation writes."""

    json: Path | None = None
    """Write the results to this file as JSON."""
    log_probs: Path | None = None
    """Write each scored token's log-probability to this file, .npz or .jsonl."""
    plot: Path | None = None
    """Draw the losses against the memory, segment or clamp lengths into this PNG file."""

    def check(self, overrides: Overrides) -> None:
        """Raise ConfigError if this evaluation has no data for a requested file, or if two flags name the same file.

        A process without other ranks also checks that each file can be written. The ranks of a job check this after
        they have joined (`check_files`).
        """
        is_several = overrides.num_combinations > 1
        if self.log_probs is not None and (is_several or overrides.without_memory or overrides.peer is not None):
            raise ConfigError(
                "--log-probs needs one evaluation of the whole split. Give at most one value to each of "
                "--memory-len, --segment-len and --clamp-len, and remove --without-memory and --protocol."
            )
        if self.plot is not None and not is_several:
            raise ConfigError(
                "--plot draws losses over several lengths. Give several values to --memory-len, --segment-len or "
                "--clamp-len."
            )
        require_apart({"--json": self.json, "--log-probs": self.log_probs, "--plot": self.plot})
        if is_alone():
            self.check_files()

    def check_files(self) -> None:
        """Try to write each file, on one rank, and remove what was created. Raises ConfigError if a file cannot be
        written."""
        for flag, path, suffixes in (
            ("--log-probs", self.log_probs, (".npz", ".jsonl")),
            ("--plot", self.plot, (".png",)),
            ("--json", self.json, ()),
        ):
            if path is not None:
                check_output(flag, path, suffixes=suffixes)


@dataclass(frozen=True, kw_only=True)
class AdaptationOptions:
    """Options of an additional evaluation, in which the model adapts to the text that it has scored. The score of the
    model that does not adapt stays unchanged."""

    adapt: Literal["off", "dynamic", "cache"] = "off"
    """Also score a model that adapts to the text. dynamic: a gradient step after each segment (Krause et al. 2019).
    cache: prefer tokens that followed similar hidden states (Grave et al. 2017)."""
    adapt_train: str = ""
    """dynamic: corpus whose train split gives the gradient sizes, which scale the steps. Default: the scored corpus."""
    adapt_batches: Annotated[int, Field(ge=1, le=_MOST), Rule(f"1 to {_MOST:,} batches")] = 150
    """dynamic: number of training batches from which gradient sizes are computed."""
    adapt_lr: Annotated[float, Field(gt=0, allow_inf_nan=False), Rule("above 0")] = 2e-6
    """dynamic: learning rate. It is relative to gradient sizes summed over --adapt-batches, so tune --adapt-lr and
    --adapt-batches together."""
    adapt_decay: Annotated[float, Field(ge=0, allow_inf_nan=False), Rule("0 or more")] = 0.0
    """dynamic: rate at which weights return to their trained values."""
    adapt_eps: Annotated[float, Field(gt=0, allow_inf_nan=False), Rule("above 0")] = 1e-5
    """dynamic: small number added to the gradient sizes."""
    cache_share: Annotated[float, Field(ge=0, lt=1), Rule("0 or more and below 1")] = 0.1
    """cache: weight of the cache in the mixture of probabilities, 0 to below 1."""
    cache_theta: Annotated[float, Field(ge=0, allow_inf_nan=False), Rule("0 or more")] = 1.0
    """cache: factor by which dot products of hidden states are multiplied. 0: all kept tokens have the same weight."""
    cache_window: Annotated[int, Field(ge=1, le=_MOST), Rule(f"1 to {_MOST:,} tokens")] = 500
    """cache: number of past tokens to keep per lane (batch row)."""

    def metadata(self) -> dict[str, str | int | float]:
        """Return the kind of adaptation and its options by name."""
        return {"by": self.adapt} | {name: getattr(self, name) for name in _ADAPTS_BY[self.adapt]}

    def check(self, overrides: Overrides, outputs: Outputs) -> None:
        """Raise ConfigError for a number out of range, for an option of another kind of adaptation, and if there is
        more than one evaluation without adaptation to compare with."""
        check_bounds(self)
        for kind, names in _ADAPTS_BY.items():
            if kind == self.adapt:
                continue
            for name in names:
                if getattr(self, name) != getattr(AdaptationOptions, name):
                    raise ConfigError(
                        f"{flag_of(name)} works only with --adapt {kind}, not with --adapt {self.adapt}. Remove "
                        f"{flag_of(name)}, or give --adapt {kind}."
                    )
        if self.adapt == "off":
            return
        if overrides.num_combinations > 1 or overrides.peer is not None or outputs.log_probs is not None:
            raise ConfigError(
                f"the result of --adapt {self.adapt} is compared with one evaluation of the whole split without "
                "--adapt. Give at most one value to each of --memory-len, --segment-len and --clamp-len, and remove "
                "--protocol and --log-probs."
            )
        if self.adapt == "dynamic" and overrides.precision == "bf16":
            raise ConfigError("--adapt dynamic updates weights in fp32. Remove --precision bf16.")
        if self.adapt == "dynamic" and not is_alone():
            raise ConfigError(
                "--adapt dynamic updates the weights after every segment and cannot split these updates over ranks. "
                "Start this evaluation as one process."
            )


_ADAPTS_BY = {
    "dynamic": ("adapt_train", "adapt_batches", "adapt_lr", "adapt_decay", "adapt_eps"),
    "cache": ("cache_share", "cache_theta", "cache_window"),
}
"""Names of the options that belong to each kind of adaptation."""


@dataclass(frozen=True, kw_only=True)
class ReclSettings:
    """Options of the measurement of the context length that a group of models uses (`txl recl`)."""

    split: str = ""
    """Split to score. Default: data.eval_split of the first run."""
    step: Annotated[int, Field(ge=1, le=_MOST), Rule(f"1 to {_MOST:,} tokens")] = 100
    """Tokens by which the context grows, and length of the shortest context."""
    max_context: Annotated[_Length, Rule(f"0 to {_MOST:,} tokens")] = 1000
    """Longest context, in tokens."""
    r: tuple[float, ...] = (0.1, 0.5, 1.0)
    """Shares of the targets (the hardest targets) on which the RECL is computed. One result per share."""
    num_tokens: Annotated[int, Field(ge=1, le=_MOST), Rule(f"1 to {_MOST:,} targets")] = 500
    """Number of targets drawn from the split. Each target is scored after every length of context."""
    memory_len: Annotated[_LengthOrTrained, Rule(_AS_TRAINED)] = -1
    """Tokens of memory of all models that have a memory. -1: as in training."""
    num_lanes: Annotated[int, Field(ge=1, le=_MOST), Rule(f"1 to {_MOST:,} lanes")] = 50
    """Number of targets scored at once."""
    precision: InferencePrecision = "stored"
    """Number type of the computation. stored: that of the bundle's weights (fp32 for a run and for int8)."""
    seed: Annotated[int, Field(ge=0, lt=2**63), Rule("0 or more and below 2**63")] = 0
    """Seed of the random choice of targets."""

    @property
    def contexts(self) -> list[int]:
        """Lengths of context in tokens, the shortest first."""
        return list(range(self.step, self.max_context + 1, self.step))

    def check(self) -> None:
        """Raise ConfigError for a number out of range, and for options that give fewer than two lengths of context."""
        check_bounds(self)
        if len(self.contexts) < 2:
            raise ConfigError(
                f"--max-context {self.max_context}: it must be at least twice --step {self.step} (tokens)."
            )
        if not self.r or not all(0 < share <= 1 for share in self.r):
            raise ConfigError(
                f"--r {' '.join(map(str, self.r))}: each share of the targets must be above 0 and at most 1."
            )


@dataclass(frozen=True, kw_only=True)
class ReclOutputs:
    """Files that `txl recl` writes."""

    json: Path | None = None
    """Write the results to this file as JSON."""
    plot: Path | None = None
    """Draw the losses against the context length into this PNG file."""

    def check(self) -> None:
        """Raise ConfigError if two flags name the same file.

        A process without other ranks also checks that each file can be written.
        """
        require_apart({"--json": self.json, "--plot": self.plot})
        if is_alone():
            self.check_files()

    def check_files(self) -> None:
        """Try to write each file, on one rank, as `Outputs.check_files` does.

        Raises ConfigError if a file cannot be written.
        """
        for flag, path, suffixes in (("--json", self.json, ()), ("--plot", self.plot, (".png",))):
            if path is not None:
                check_output(flag, path, suffixes=suffixes)


def is_alone() -> bool:
    """Return whether this process runs without other ranks."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def require_apart(files: Mapping[str, Path | None]) -> None:
    """Raise ConfigError if two flags name the same file. `files` maps each flag to its path."""
    named = [path.resolve() for path in files.values() if path is not None]
    if len(set(named)) < len(named):
        *flags, last = files
        raise ConfigError(f"{', '.join(flags)} and {last} name the same file. Name a different file for each flag.")


def check_output(flag: str, path: Path, *, suffixes: tuple[str, ...] = ()) -> None:
    """Raise ConfigError for a file that cannot be written, before the evaluation starts.

    A file that this check creates is removed again.
    """
    if suffixes and path.suffix not in suffixes:
        raise ConfigError(f"{flag} {path}: the file name must end in {' or '.join(suffixes)}.")
    if path.exists() and not path.is_file() and not path.is_dir():
        return  # to open a pipe is to wait for its reader, or to end it
    is_new = not path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}. Name another file with {flag}.") from error
