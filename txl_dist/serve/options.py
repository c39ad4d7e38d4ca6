"""How a model is served: where, to whom, and within which limits. Imports no torch: the command line makes its flags of
it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from txl_dist.errors import ConfigError
from txl_dist.io.files import open_text

API_KEY = "TXL_API_KEY"
"""Variable of the environment that may hold the key."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How a model is served."""

    host: str = "127.0.0.1"
    """Address to listen on: of this machine alone, unless told otherwise; 0.0.0.0 is all of its addresses."""
    port: int = 8000
    """Port to listen on; 0 takes a free one and says which."""
    name: str = ""
    """What clients call the model; empty is the name of its folder."""
    api_key: str = ""
    """Ask clients for this key. Flags are seen by others on this machine: rather --api-key-file, or TXL_API_KEY in the
    environment."""
    api_key_file: Path | None = None
    """Ask clients for the key in this file."""
    rows: int = 64
    """Texts that are written at once; each holds a memory."""
    queue: int = 256
    """Prompts that may wait for a row; who comes then is told to come again."""
    memory_len: int = -1
    """Tokens of the past that are seen; more than in training is allowed. -1 means as trained."""
    max_prompt: int = 32_768
    """Most tokens of a prompt."""
    max_tokens: int = 4_096
    """Most tokens to make of a text."""
    max_texts: int = 64
    """Most texts of a request: its prompts times n."""
    max_logprobs: int = 20
    """Most alternatives that are told of a token."""
    max_body: int = 2**20
    """Most bytes of a request, but of a memory's file."""
    timeout: float = 600.0
    """Seconds for a request: then its texts end as they are, and one that has not begun is refused."""
    grace: float = 30.0
    """Seconds that texts in work get on SIGTERM, before they end as they are."""
    memories: int = 1_000
    """Most memories that are kept for clients; 0 keeps none. The one that was not used for longest goes first."""
    memory_bytes: int = 2**30
    """Most bytes of them."""
    memory_age: float = 3_600.0
    """Seconds after its last use that a memory is kept."""

    def check(self) -> None:
        """Raises ConfigError for a setting out of range."""
        rules = [
            ("port", 0 <= self.port < 2**16, "0 ... 65535"),
            ("rows", self.rows >= 1, "1 or more texts"),
            ("queue", self.queue >= 1, "1 or more prompts"),
            ("memory_len", self.memory_len >= -1, "0 or more tokens, or -1 for as trained"),
            ("max_prompt", self.max_prompt >= 1, "1 or more tokens"),
            ("max_tokens", self.max_tokens >= 1, "1 or more tokens"),
            ("max_texts", self.max_texts >= 1, "1 or more texts"),
            ("max_logprobs", self.max_logprobs >= 0, "0 or more tokens"),
            ("max_body", self.max_body >= 1, "1 or more bytes"),
            ("timeout", self.timeout > 0, "above 0 seconds"),
            ("grace", self.grace >= 0, "0 or more seconds"),
            ("memories", self.memories >= 0, "0 or more"),
            ("memory_bytes", self.memory_bytes >= 0, "0 or more bytes"),
            ("memory_age", 0 < self.memory_age < math.inf, "above 0 seconds"),
        ]
        for name, holds, rule in rules:
            if not holds:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: it must be {rule}.")

    def key(self) -> str:
        """The key that clients must give; empty asks for none. Raises ConfigError for one that cannot be used."""
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
