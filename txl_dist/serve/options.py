"""Options of `txl serve`: address, key, and limits. Each field is a flag, and its docstring is the help text.

This module imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from txl_dist.config.flags import Rule, check_bounds
from txl_dist.errors import ConfigError
from txl_dist.io.files import open_text

API_KEY = "TXL_API_KEY"
"""Environment variable that can contain the API key."""

Port = Annotated[int, Field(ge=0, lt=2**16), Rule("0 ... 65535")]
Texts = Annotated[int, Field(ge=1), Rule("1 or more texts")]
Prompts = Annotated[int, Field(ge=1), Rule("1 or more prompts")]
MemoryLen = Annotated[int, Field(ge=-1), Rule("0 or more tokens, or -1 for the value of training")]
Tokens = Annotated[int, Field(ge=1), Rule("1 or more tokens")]
TokensOrNone = Annotated[int, Field(ge=0), Rule("0 or more tokens")]
Bytes = Annotated[int, Field(ge=1), Rule("1 or more bytes")]
BytesOrNone = Annotated[int, Field(ge=0), Rule("0 or more bytes")]
Count = Annotated[int, Field(ge=0), Rule("0 or more")]
Duration = Annotated[float, Field(gt=0), Rule("above 0 seconds")]
DurationOrNone = Annotated[float, Field(ge=0), Rule("0 or more seconds")]
FiniteDuration = Annotated[float, Field(gt=0, allow_inf_nan=False), Rule("above 0 seconds")]


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Options of `txl serve`."""

    host: str = "127.0.0.1"
    """Address to listen on. The default accepts only clients on this machine. Use 0.0.0.0 to accept all clients."""
    port: Port = 8000
    """Port to listen on. 0: choose a free port and print it."""
    name: str = ""
    """Name of the model for clients. Empty: the name of the model's folder."""
    api_key: str = ""
    """Key that clients must send. Other users of the machine can see flags, so prefer --api-key-file or TXL_API_KEY."""
    api_key_file: Path | None = None
    """File with the key that clients must send."""
    max_num_seqs: Texts = 64
    """Maximum number of texts generated at once. Each text has its own memory."""
    max_queue: Prompts = 256
    """Maximum number of queued prompts. Further requests get HTTP 429."""
    memory_len: MemoryLen = -1
    """Tokens of memory. The number can be larger than in training. -1: as many as in training."""
    max_prompt_len: Tokens = 32_768
    """Maximum tokens per prompt."""
    max_tokens: Tokens = 4_096
    """Maximum tokens to generate per text."""
    max_choices: Texts = 64
    """Maximum texts per request: number of prompts times n."""
    max_logprobs: TokensOrNone = 20
    """Maximum number of alternative tokens, per position, whose log-probabilities a request can get."""
    max_body_bytes: Bytes = 2**20
    """Maximum bytes of a request's body. The upload of a memory can be larger."""
    timeout: Duration = 600.0
    """Maximum seconds per request. After this time its texts are cut off. If no text has begun, the request gets HTTP
    408."""
    shutdown_timeout: DurationOrNone = 30.0
    """Seconds in which running requests can finish after SIGTERM."""
    memories: Count = 1_000
    """Maximum number of stored memories. The least recently used memory is removed first. 0: store none."""
    memory_bytes: BytesOrNone = 2**30
    """Maximum bytes of all stored memories."""
    memory_ttl: FiniteDuration = 3_600.0
    """Seconds after the last use until a memory expires."""

    def check(self) -> None:
        """Raise ConfigError for an option out of range."""
        check_bounds(self)

    def key(self) -> str:
        """Return the key that clients must send. It is empty if no key is needed. Raises ConfigError for an unusable
        key."""
        if self.api_key and self.api_key_file is not None:
            raise ConfigError("--api-key and --api-key-file both give a key. Use only one of these flags.")
        key = self.api_key or os.environ.get(API_KEY, "")
        if self.api_key_file is not None:
            try:
                with open_text(self.api_key_file) as stream:
                    key = stream.read().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"cannot read --api-key-file {self.api_key_file}: {error}. Name another file."
                ) from error
            if not key:
                raise ConfigError(f"--api-key-file {self.api_key_file} is empty. Write a key into the file.")
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ConfigError(
                "the API key may contain only printable ASCII characters without blanks. Choose another key."
            )
        return key
