"""Advice for a path that this server does not have, because it is misspelt or belongs to another server."""

from __future__ import annotations

import re
from collections.abc import Collection

from txl_dist.console.suggest import did_you_mean

_COMPLETIONS = "Call POST /v1/completions with `prompt`."
_BASE_MODEL = f"This is a base model: it continues a text and has no chat roles or tools. {_COMPLETIONS}"
_FOREIGN_PATHS = [
    (r"(/v1)?/(chat|responses|messages|threads|assistants|conversations|realtime)\b|/api/chat\b", _BASE_MODEL),
    (r"(/v1)?/(complete|completion|edits|generate|generate_stream)$|/v1/engines/.+", _COMPLETIONS),
    (r"/api/generate$|/invocations$|/predict$", _COMPLETIONS),
    (
        r"(/v1|/v2|/api)?/(embed|embeddings|pooling|rerank|score|classify)\b",
        "This server generates text and has no embeddings. To score a text, call POST /v1/completions with `echo`, "
        "`logprobs` and `max_tokens` 0.",
    ),
    (r"(/v1)?/(audio|images|videos|moderations)\b", f"This server generates text only. {_COMPLETIONS}"),
    (
        r"(/v1)?/(files|uploads|batches|fine_tuning|fine-tunes|vector_stores|evals|containers)\b",
        f"This server keeps no files and runs no jobs. {_COMPLETIONS}",
    ),
    (r"/v1$|/api/(tags|show|ps)$|(/v1)?/engines$", "Call GET /v1/models."),
    (r"/(healthz|livez|readyz|ready|live|ping|status)$", "Call GET /health."),
    (r"/(docs|redoc|swagger)\b", "See /openapi.json."),
]
"""Regular expressions that match the beginning of other servers' paths, and what to call on this server instead."""


def advice(path: str, *, known: Collection[str]) -> str:
    """Return a sentence for an error message that says what to call instead of `path`.

    `known` are the paths that the server has.
    """
    plain = re.sub(r"/+", "/", path).rstrip("/").replace("/v1/v1", "/v1")
    for candidate in (plain, f"/v1{plain}", plain.removeprefix("/v1")):
        if candidate in known:
            return f"Call {candidate}."
    for pattern, sentence in _FOREIGN_PATHS:
        if re.match(pattern, plain):
            return sentence
    return f"See /openapi.json.{did_you_mean(path, known)}"
