"""What may be asked of `txl evaluate`. Light to import, since the command line makes its flags of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from txl_dist.errors import ConfigError

_MOST = 1 << 20
"""Of tokens and lanes: more than any memory of use, and less than what the settings allow."""


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """How an evaluation differs from training; the defaults change nothing. Weights are never touched."""

    split: str = ""
    """Split to score; the default is the run's."""
    memory_len: tuple[int, ...] = (-1,)
    """Tokens of memory; -1 means as trained. Several, for instance 0 64 512, are scored one after the other."""
    segment_len: int = 0
    """Tokens per forward pass; 0 means as trained."""
    num_lanes: int = 0
    """Stripes that the split is cut into; 0 means as configured."""
    overlap_len: int = 0
    """Tokens before each segment that are run again, not scored, as context; only with --memory-len 0. 0 means as
    configured."""
    clamp_len: int = -1
    """Distances above this many tokens share one encoding; -1 means as trained, 0 no clamping."""
    same_length: Literal["trained", "off", "memory", "memory_and_self"] = "trained"
    """Keys that a query sees: memory_len of them (memory: original PyTorch code and Hugging Face), one more
    (memory_and_self: NVIDIA and TensorFlow), all (off), or as trained."""
    zero_memory: bool = False
    """Begin with a memory of zeros that is attended, as Hugging Face and TensorFlow do."""
    without_memory: bool = False
    """Also score with memory off, to see what memory brings."""

    def check(self, target: Path, *, is_bundle: bool, data: str | Path) -> None:
        """Of what is scored, on what corpus, if one is named. Raises ConfigError for a number that no evaluation can
        have, and for a bundle without a corpus."""
        if is_bundle and not data:
            raise ConfigError(f"{target} is a bundle and knows no corpus. Name one with --data.")
        if not self.memory_len:
            raise ConfigError("--memory-len needs a value: 0 or more tokens, or several, for instance 0 64 512.")
        numbers = [("memory_len", length) for length in self.memory_len]
        numbers += [(name, getattr(self, name)) for name in ("segment_len", "num_lanes", "overlap_len", "clamp_len")]
        for name, value in numbers:
            flag, unit = f"--{name.replace('_', '-')}", "lanes" if name == "num_lanes" else "tokens"
            if value < (-1 if name in ("memory_len", "clamp_len") else 0):
                raise ConfigError(f"{flag} {value}: it must be 0 or more {unit}. Leave it out for as trained.")
            if value > _MOST:
                raise ConfigError(f"{flag} {value}: it must be at most {_MOST:,} {unit}.")
