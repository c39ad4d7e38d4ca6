"""Options of `txl serve`: address, key, and limits. Each field is a flag, its docstring the help text. No torch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from txl_dist.errors import ConfigError
from txl_dist.io.files import open_text

API_KEY = "TXL_API_KEY"
"""Environment variable that may hold the key."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Options of a server."""

    host: str = "127.0.0.1"
    """Address to listen on. The default accepts only clients of this machine, 0.0.0.0 all."""
    port: int = 8000
    """Port to listen on. 0 takes a free one and prints it."""
    name: str = ""
    """Name of the model for clients. Empty: the name of its folder."""
    api_key: str = ""
    """Key that clients must send. Other users of this machine see flags: prefer --api-key-file or TXL_API_KEY."""
    api_key_file: Path | None = None
    """File with the key that clients must send."""
    max_num_seqs: int = 64
    """Maximum texts generated at once, each with its memory."""
    max_queue: int = 256
    """Maximum number of queued prompts. Further requests get HTTP 429."""
    memory_len: int = -1
    """Tokens of memory, also more than in training. -1: as trained."""
    max_prompt_len: int = 32_768
    """Maximum tokens per prompt."""
    max_tokens: int = 4_096
    """Maximum tokens to generate per text."""
    max_choices: int = 64
    """Maximum texts per request: prompts times n."""
    max_logprobs: int = 20
    """Maximum alternatives per token with log-probabilities."""
    max_body_bytes: int = 2**20
    """Maximum bytes of a request's body. A memory's file may be larger."""
    timeout: float = 600.0
    """Seconds per request. Then its texts end, or it gets HTTP 408 if it has not begun."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests get after SIGTERM."""
    memories: int = 1_000
    """Maximum stored memories. The least recently used is removed first. 0 stores none."""
    memory_bytes: int = 2**30
    """Maximum bytes of all stored memories."""
    memory_ttl: float = 3_600.0
    """Seconds after its last use until a memory expires."""

    def check(self) -> None:
        """Raise ConfigError for an option out of range."""
        rules = [
            ("port", 0 <= self.port < 2**16, "0 ... 65535"),
            ("max_num_seqs", self.max_num_seqs >= 1, "1 or more texts"),
            ("max_queue", self.max_queue >= 1, "1 or more prompts"),
            ("memory_len", self.memory_len >= -1, "0 or more tokens, or -1 for as trained"),
            ("max_prompt_len", self.max_prompt_len >= 1, "1 or more tokens"),
            ("max_tokens", self.max_tokens >= 1, "1 or more tokens"),
            ("max_choices", self.max_choices >= 1, "1 or more texts"),
            ("max_logprobs", self.max_logprobs >= 0, "0 or more tokens"),
            ("max_body_bytes", self.max_body_bytes >= 1, "1 or more bytes"),
            ("timeout", self.timeout > 0, "above 0 seconds"),
            ("shutdown_timeout", self.shutdown_timeout >= 0, "0 or more seconds"),
            ("memories", self.memories >= 0, "0 or more"),
            ("memory_bytes", self.memory_bytes >= 0, "0 or more bytes"),
            ("memory_ttl", 0 < self.memory_ttl < math.inf, "above 0 seconds"),
        ]
        for name, holds, rule in rules:
            if not holds:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: it must be {rule}.")

    def key(self) -> str:
        """Return the key that clients must send; empty if none is needed. Raises ConfigError for an unusable key."""
        if self.api_key and self.api_key_file is not None:
            raise ConfigError("--api-key and --api-key-file both give a key. Give one of them.")
        key = self.api_key or os.environ.get(API_KEY, "")
        if self.api_key_file is not None:
            try:
                with open_text(self.api_key_file) as stream:
                    key = stream.read().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"cannot read --api-key-file {self.api_key_file}: {error}. Name another.") from error
            if not key:
                raise ConfigError(f"--api-key-file {self.api_key_file} is empty. Write a key into it.")
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ConfigError("the API key may hold printable ASCII without blanks only. Choose another.")
        return key
