"""Sentences that describe the events of a run, for the console and for the page of `txl report`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from txl_dist.console.formatting import counted, format_bytes

_DETAILS = {
    "start": "{ranks_text} on {hosts_text} ({device}), {threads_text} each; torch {torch}",
    "saved": "{path}, {size}; training waited for {seconds:.2f} s",
    "save_failed": "log.txt says why; the run will try again",
    "replicas_agree": "all ranks hold the same parameters; compared in {seconds:.2f} s",
    "skipped": "a loss or gradient is not finite; weights and memories stayed as they were",
    "spike": "{what} {value:.4g}, the median before it {median:.4g}: {sigmas:.1f} sigma",
    "rewound": "from step {from:,}; the text in between is left out",
    "straggler": "rank {rank} on {host} took {pct:.1f} % longer than the median of the others",
    "clipped": "{clipped_pct:.0f} % of {steps:,} steps, by the default optim.clip_norm {clip_norm:g}; the gradients' "
    "norm was {grad_norm:.3g} on average. Set optim.clip_norm",
    "stopped": "the same command continues",
    "phase": "this phase is done; the next one begins",
    "done": "all steps are finished",
}
"""Sentence of each event, with its fields and those that `_readable` adds."""
_COUNTS = {"ranks": "rank", "hosts": "host", "threads_per_rank": "thread"}


def event_details(event: str, fields: Mapping[str, Any]) -> str:
    """Return a sentence on an event from its fields; for an event of another version, a list of the fields."""
    try:
        return _DETAILS[event].format(**fields, **_readable(fields))
    except (LookupError, ValueError, TypeError, OverflowError):
        return ", ".join(f"{name} {value}" for name, value in fields.items() if not isinstance(value, dict | list))


def _readable(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return counts with their nouns, and sizes with their units, of those fields that an event has."""
    texts = {}
    for name, noun in _COUNTS.items():
        if type(fields.get(name)) is int:
            texts[f"{noun}s_text"] = counted(fields[name], noun)
    if isinstance(fields.get("gib"), int | float):
        texts["size"] = format_bytes(2**30 * fields["gib"])
    return texts
