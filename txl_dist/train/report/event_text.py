"""Sentences that describe the events of a run, for the console and for the page of `txl report`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from txl_dist.console.formatting import counted, format_bytes

_DETAILS = {
    "start": "{ranks_text} on {hosts_text} ({device}), {threads_text} per rank, torch {torch}",
    "saved": "{path}, {size}. Training waited for {seconds:.2f} s",
    "save_failed": "log.txt contains the reason. The run will try again",
    "replicas_agree": "all ranks have the same parameters. The comparison took {seconds:.2f} s",
    "skipped": "a loss or gradient is not finite. The step changed no weights and no memories",
    "spike": "{what} {value:.4g} after a median of {median:.4g}, a deviation of {sigmas:.1f} sigma",
    "rewound": "back from step {from:,}. Training skips the text of the spike",
    "recovered": "{why}. The job continued in generation {generation}{source_text} after {notice_s:.2f} s to notice, "
    "{regroup_s:.2f} s to regroup, {restore_s:.2f} s to restore and {redo_s:.2f} s {redo_text}",
    "straggler": "rank {rank} on {host} took {pct:.1f} % longer than the median of the others",
    "clipped": "{clipped_pct:.0f} % of {steps:,} steps were clipped by the default optim.clip_norm={clip_norm:g}. "
    "The mean gradient norm was {grad_norm:.3g}. Set optim.clip_norm",
    "stopped": "the same command continues the run",
    "phase": "this phase of the run is done. The next phase begins",
    "done": "all steps of the run are finished",
}
"""Sentence for each event: a format string with the fields of the event and the texts of `_readable`."""
_COUNTS = {"ranks": "rank", "hosts": "host", "threads_per_rank": "thread"}
"""Fields that hold counts, and the singular noun that is shown after each count."""
RESTORED_FROM = {"copies": "copies", "checkpoint": "a checkpoint", "start": "the start of the run"}
"""Words for the field `restored_from` of the event `recovered`."""


def event_details(event: str, fields: Mapping[str, Any]) -> str:
    """Return a sentence that describes an event. `fields` are the values that its record contains.

    For an unknown event, which another version of the package wrote, the result is a list of the fields.
    """
    try:
        return _DETAILS[event].format(**fields, **_readable(fields))
    except (LookupError, ValueError, TypeError, OverflowError):
        return ", ".join(f"{name} {value}" for name, value in fields.items() if not isinstance(value, dict | list))


def _readable(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return texts for those fields that are counts or sizes, and for those of a recovery.

    A text is, for instance, "2 ranks" or "1.3 GiB".
    """
    texts = {}
    for name, noun in _COUNTS.items():
        if type(fields.get(name)) is int:
            texts[f"{noun}s_text"] = counted(fields[name], noun)
    if isinstance(fields.get("gib"), int | float):
        texts["size"] = format_bytes(2**30 * fields["gib"])
    source = RESTORED_FROM.get(str(fields.get("restored_from")))
    texts["source_text"] = f" from {source}" if source else ""
    texts["redo_text"] = _redo_text(fields.get("repeated_steps"))
    return texts


def _redo_text(repeated_steps: object) -> str:
    """Say which step of a recovery was measured. Older versions recorded no number of repeated steps."""
    if repeated_steps == 0:
        return "for the next step"
    if type(repeated_steps) is int and repeated_steps > 1:
        return f"for the first of {repeated_steps:,} repeated steps"
    return "to repeat the step"
