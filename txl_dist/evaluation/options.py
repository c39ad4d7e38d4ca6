"""What may be asked of `txl evaluate` and `txl recl`. Light to import, since the command line makes its flags of it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from txl_dist.errors import ConfigError

_MOST = 1 << 20
"""Of tokens and lanes: more than any memory of use, and less than what the settings allow."""


class Protocol(NamedTuple):
    """Protocol of another program, as far as it is no argument there: docs/evaluating.md, data/loader/protocols.py."""

    num_lanes: int
    same_length: Literal["off", "memory", "memory_and_self"]
    """What its published recipes evaluate with, where there is memory."""
    cut: Literal["rows", "warm rows", "crops"]
    source: str


PROTOCOLS = {
    "original": Protocol(10, "memory", "rows", "kimiyoung/transformer-xl, pytorch/eval.py"),
    "nvidia": Protocol(16, "memory_and_self", "warm rows", "NVIDIA/DeepLearningExamples, eval.py of Transformer-XL"),
    "nanogpt": Protocol(64, "off", "crops", "karpathy/nanoGPT, estimate_loss of train.py"),
}
NUM_CROP_BATCHES, CROP_SEED = 200, 1337
"""Of nanoGPT: its eval_iters and its seed, though not its generator."""


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """How an evaluation differs from training; the defaults change nothing. Weights are never touched."""

    split: str = ""
    """Split to score; the default is the run's."""
    memory_len: tuple[int, ...] = (-1,)
    """Tokens of memory; -1 means as trained. Several, for instance 0 64 512, are scored one after the other."""
    segment_len: tuple[int, ...] = (0,)
    """Tokens per forward pass; 0 means as trained. Each combination with several memories and clamps is scored."""
    num_lanes: int = 0
    """Stripes that the split is cut into; 0 means as configured."""
    overlap_len: int = 0
    """Tokens before each segment that are run again, not scored, as context; only with --memory-len 0. 0 means as
    configured."""
    clamp_len: tuple[int, ...] = (-1,)
    """Distances above this many tokens share one encoding; -1 means as trained, 0 no clamping."""
    same_length: Literal["trained", "off", "memory", "memory_and_self"] = "trained"
    """Keys that a query sees: memory_len of them (memory: original PyTorch code and Hugging Face), one more
    (memory_and_self: NVIDIA and TensorFlow), all (off), or as trained."""
    zero_memory: bool = False
    """Begin with a memory of zeros that is attended, as Hugging Face and TensorFlow do."""
    without_memory: bool = False
    """Also score with memory off, to see what memory brings."""
    accuracy: bool = False
    """Also tell the share of tokens whose most probable token is the target; not of rows that adapt."""
    protocol: Literal["ours", "original", "nvidia", "nanogpt"] = "ours"
    """Cut the text and count as that program does, to set a result beside its published ones."""

    @property
    def peer(self) -> Protocol | None:
        """Whose protocol it is; None for ours."""
        return PROTOCOLS.get(self.protocol)

    @property
    def num_combinations(self) -> int:
        """Evaluations that the lengths ask for."""
        return len(self.memory_len) * len(self.segment_len) * len(self.clamp_len)

    def check(self, target: Path, *, is_bundle: bool, data: str | Path) -> None:
        """Of what is scored, on what corpus, if one is named. Raises ConfigError for a number that no evaluation can
        have, for a protocol with what it has itself, and for a bundle without a corpus."""
        if is_bundle and not data:
            raise ConfigError(f"{target} is a bundle and knows no corpus. Name one with --data.")
        for name, example in (("memory_len", "0 64 512"), ("segment_len", "16 64"), ("clamp_len", "0 400")):
            values = getattr(self, name)
            flag = _flag(name)
            if not values:
                raise ConfigError(f"{flag} needs a value: 0 or more tokens, or several, for instance {example}.")
            for value in values:
                check_number(flag, value, least=0 if name == "segment_len" else -1)
        check_number("--num-lanes", self.num_lanes, unit="lanes")
        check_number("--overlap-len", self.overlap_len)
        if self.peer is not None:
            self._check_protocol(self.peer)

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
        if found := [flag for flag, is_given in refused.items() if is_given]:
            raise ConfigError(
                f"{', '.join(found)} contradicts --protocol {self.protocol}, which has its own way there "
                f"({peer.source}). Leave out one or the other."
            )


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Files that an evaluation writes."""

    json: Path | None = None
    """Write the results to this file too."""
    log_probs: Path | None = None
    """Write the log-probability of each scored token to this file, .npz or .jsonl."""
    plot: Path | None = None
    """Draw the losses over memory, segment or clamp lengths into this PNG file."""

    def check(self, overrides: Overrides) -> None:
        """Raises ConfigError for a file that this evaluation has nothing for, and where this process is alone for one
        that cannot be written; ranks of a job look once they have met (`check_files`)."""
        is_several = overrides.num_combinations > 1
        if self.log_probs is not None and (is_several or overrides.without_memory or overrides.peer is not None):
            raise ConfigError(
                "--log-probs is of one evaluation of the whole split. Give one --memory-len, --segment-len and "
                "--clamp-len, and leave out --without-memory and --protocol."
            )
        if self.plot is not None and not is_several:
            raise ConfigError(
                "--plot draws losses over several lengths. Give several to --memory-len, --segment-len or --clamp-len."
            )
        require_apart({"--json": self.json, "--log-probs": self.log_probs, "--plot": self.plot})
        if is_alone():
            self.check_files()

    def check_files(self) -> None:
        """Of one rank: it tries each file, and takes back what it made. Raises ConfigError if one cannot be written."""
        for flag, path, suffixes in (
            ("--log-probs", self.log_probs, (".npz", ".jsonl")),
            ("--plot", self.plot, (".png",)),
            ("--json", self.json, ()),
        ):
            if path is not None:
                check_output(flag, path, suffixes=suffixes)


@dataclass(frozen=True, kw_only=True)
class AdaptationOptions:
    """A row of its own, of a model that adapts to what it has scored; the static one stays as it is."""

    adapt: Literal["off", "dynamic", "cache"] = "off"
    """Also score while adapting: dynamic takes a gradient step behind each segment (Krause et al. 2019), cache recalls
    what followed like hidden states (Grave et al. 2017)."""
    adapt_train: str = ""
    """Corpus, a folder or URL, whose training split tells how large gradients are, for dynamic; the default is the one
    that is scored."""
    adapt_batches: int = 150
    """Batches of it, as many lanes and tokens each as are scored at a time."""
    adapt_lr: float = 2e-6
    """Rate of the steps; relative to the gradients summed over those batches, so tune both together."""
    adapt_decay: float = 0.0
    """How fast weights return to where they began."""
    adapt_eps: float = 1e-5
    """Added to the root of the summed squares of gradients."""
    cache_share: float = 0.1
    """Of the cache in the mixture, 0 to below 1."""
    cache_theta: float = 1.0
    """Factor of the products of hidden states; 0 takes all of the window alike."""
    cache_window: int = 500
    """Tokens of the past that the cache holds, per lane."""

    def metadata(self) -> dict[str, str | int | float]:
        """What is adapted by, and the settings of it."""
        return {"by": self.adapt} | {name: getattr(self, name) for name in _ADAPTS_BY[self.adapt]}

    def check(self, overrides: Overrides, outputs: Outputs) -> None:
        """Raises ConfigError for numbers out of range, for a setting of what is off, and where no row would compare."""
        rules = {
            "adapt_batches": (1 <= self.adapt_batches <= _MOST, f"1 to {_MOST:,} batches"),
            "adapt_lr": (0 < self.adapt_lr < math.inf, "above 0"),
            "adapt_decay": (0 <= self.adapt_decay < math.inf, "0 or more"),
            "adapt_eps": (0 < self.adapt_eps < math.inf, "above 0"),
            "cache_share": (0 <= self.cache_share < 1, "0 or more and below 1"),
            "cache_theta": (0 <= self.cache_theta < math.inf, "0 or more"),
            "cache_window": (1 <= self.cache_window <= _MOST, f"1 to {_MOST:,} tokens"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ConfigError(f"{_flag(name)} {getattr(self, name)}: it must be {rule}.")
        for kind, names in _ADAPTS_BY.items():
            for name in names if kind != self.adapt else ():
                if getattr(self, name) != getattr(AdaptationOptions, name):
                    raise ConfigError(
                        f"{_flag(name)} is of --adapt {kind}, not of --adapt {self.adapt}. Leave one out."
                    )
        if self.adapt == "off":
            return
        if overrides.num_combinations > 1 or overrides.peer is not None or outputs.log_probs is not None:
            raise ConfigError(
                f"--adapt {self.adapt} stands beside one static evaluation of the whole split. Give one --memory-len, "
                "--segment-len and --clamp-len, and leave out --protocol and --log-probs."
            )
        if self.adapt == "dynamic" and not is_alone():
            raise ConfigError(
                "--adapt dynamic changes one set of weights from segment to segment, and its steps are not shared out. "
                "Run it as one process."
            )


_ADAPTS_BY = {
    "dynamic": ("adapt_train", "adapt_batches", "adapt_lr", "adapt_decay", "adapt_eps"),
    "cache": ("cache_share", "cache_theta", "cache_window"),
}
"""The settings of each kind."""


@dataclass(frozen=True, kw_only=True)
class ReclSettings:
    """How the context of a group of models is measured."""

    split: str = ""
    """Split to score; the default is that of the first run."""
    step: int = 100
    """Tokens by which the context grows; the shortest has as many."""
    max_context: int = 1000
    """Longest context, in tokens."""
    r: tuple[float, ...] = (0.1, 0.5, 1.0)
    """Shares of the targets that count, the hardest first."""
    num_tokens: int = 500
    """Targets that are drawn from the split; each is scored behind every length of context."""
    memory_len: int = -1
    """Tokens of memory, of all models that have one; -1 means as trained."""
    num_lanes: int = 50
    """Targets that are scored side by side."""
    seed: int = 0
    """Of the draw."""

    @property
    def contexts(self) -> list[int]:
        """In tokens, the shortest first."""
        return list(range(self.step, self.max_context + 1, self.step))

    def check(self) -> None:
        """Raises ConfigError for numbers that measure nothing."""
        for flag, value in (("--step", self.step), ("--num-tokens", self.num_tokens), ("--num-lanes", self.num_lanes)):
            check_number(flag, value, least=1, unit="lanes" if flag == "--num-lanes" else "tokens")
        check_number("--max-context", self.max_context)
        check_number("--memory-len", self.memory_len, least=-1)
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed {self.seed}: it must be 0 or more and below 2**63.")
        if len(self.contexts) < 2:
            raise ConfigError(
                f"--max-context {self.max_context}: it must be at least two steps of --step {self.step} tokens."
            )
        if not self.r or not all(0 < share <= 1 for share in self.r):
            raise ConfigError(f"--r {' '.join(map(str, self.r))}: shares must be above 0 and at most 1.")


@dataclass(frozen=True, kw_only=True)
class ReclOutputs:
    """Files that the measurement of contexts writes."""

    json: Path | None = None
    """Write the results, and every gain, to this file too."""
    plot: Path | None = None
    """Draw the losses over the length of the context into this PNG file."""

    def check(self) -> None:
        """As that of `Outputs`. Raises ConfigError."""
        require_apart({"--json": self.json, "--plot": self.plot})
        if is_alone():
            self.check_files()

    def check_files(self) -> None:
        """Of one rank, as that of `Outputs`. Raises ConfigError."""
        for flag, path, suffixes in (("--json", self.json, ()), ("--plot", self.plot, (".png",))):
            if path is not None:
                check_output(flag, path, suffixes=suffixes)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_number(flag: str, value: int, *, least: int = 0, unit: str = "tokens") -> None:
    """Raises ConfigError for a number outside of its range; -1 stands for as trained."""
    hint = "" if least > 0 else " Leave it out for as trained."
    if value < least:
        raise ConfigError(f"{flag} {value}: it must be {max(0, least)} or more {unit}.{hint}")
    if value > _MOST:
        raise ConfigError(f"{flag} {value}: it must be at most {_MOST:,} {unit}.")


def is_alone() -> bool:
    """Whether this process is no rank of a job with others."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def require_apart(files: Mapping[str, Path | None]) -> None:
    """By their flags. Raises ConfigError where two are one file."""
    named = [path.resolve() for path in files.values() if path is not None]
    if len(set(named)) < len(named):
        *flags, last = files
        raise ConfigError(f"{', '.join(flags)} and {last} name one file twice. Give each its own.")


def check_output(flag: str, path: Path, *, suffixes: tuple[str, ...] = ()) -> None:
    """Before an hour of scoring, not after it; a file that is not there yet is not left behind. Raises ConfigError."""
    if suffixes and path.suffix not in suffixes:
        raise ConfigError(f"{flag} {path}: it must end in {' or '.join(suffixes)}.")
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
