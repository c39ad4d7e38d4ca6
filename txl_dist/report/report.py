"""`txl report`: a run as one self-contained HTML page, and a few lines for the terminal.

The page needs no network and no script. All text that comes from the run is escaped, and a content security policy
forbids scripts and network access. Pictures are inline SVG (`figures`). The templates next to this file define the
page's form. The page's file is replaced only when the new page is complete. A run that has not changed gives the same
bytes.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from txl_dist.artifacts import CHECKPOINTS, LOG, PROFILE, RECORDS, SETTINGS, STACKS, TENSORBOARD
from txl_dist.console.formatting import counted, format_duration, printable
from txl_dist.errors import ConfigError
from txl_dist.io.files import atomic_replace
from txl_dist.report.pictures import marks_explained, memory_sweep, part_pictures, pictures_of, spread
from txl_dist.report.records import SCORES, Event, Scores, read_loss_parts, read_scores
from txl_dist.report.recoveries import goodput_of, goodput_sentences, lost_time, recoveries_of, recovery_rows
from txl_dist.report.summary import Fact, RunRecords, defaults, fact_lines, facts_of, fixed, lead, read_run, recent
from txl_dist.train.report.event_text import event_details

_MAX_EVENTS = 300
_MAX_SAMPLES = 12
_MAX_TEXT = 4000
"""Largest number of characters of a text sample on the page."""
_ORDINARY = ("saved", "replicas_agree")
_FILES = (SETTINGS, RECORDS, LOG, SCORES, TENSORBOARD, CHECKPOINTS, PROFILE, STACKS)


def write_report(run_dir: Path, *, out: Path | None = None) -> list[str]:
    """Write the page of a run to `out`, by default to RUN/report.html, and return a summary as lines for the terminal.

    Raises DataError if the run has no records, and ConfigError if the page cannot be written.
    """
    path = out or run_dir / "report.html"
    if run_dir.is_dir() or out is not None:
        check_writable(path)
    run = read_run(run_dir)
    facts = facts_of(run)
    lines = fact_lines(facts)
    content = _content(run, facts, folder=path.parent)
    written = write_page(path, "report.html.j2", **content)
    return [*lines, written]


def check_writable(path: Path) -> None:
    """Raise ConfigError if a page cannot be written to this path. The function is called before the page is made."""
    target = _target(path)
    folder = target.parent
    if os.path.isdir(path):
        reason = "it is a folder"
    elif not os.path.isfile(path) and (os.path.exists(path) or target.is_symlink()):
        reason = "it is not a regular file"  # a device, a pipe, or a link to itself: the page would take its place
    elif not os.path.isdir(folder):
        reason = f"there is no folder {folder}"
    elif not os.access(folder, os.W_OK | os.X_OK):
        reason = f"no permission to write to {folder}"
    else:
        return
    raise ConfigError(f"cannot write the page {path}: {reason}. Name another file with --out.")


def write_page(path: Path, template: str, **content: Any) -> str:
    """Make a page from a template, write it to a file, and return a line that names the file.

    `template` is the name of a file next to this module. `content` has the template's variables. An old file is
    replaced only when the new page is complete. Raises ConfigError if the page cannot be written.
    """
    html = render(template, **content)
    try:
        atomic_replace(_target(path), html.encode("utf-8", errors="replace"))
    except OSError as error:
        raise ConfigError(
            f"cannot write the page {path}: {error.strerror or error}. Name another file with --out."
        ) from error
    return printable(f"page: {path}")


def _target(path: Path) -> Path:
    """Return the file to which a link points. The page replaces that file and not the link."""
    return Path(os.path.realpath(path))


_NUMBER = re.compile(r"-?[\d,.]+(e[-+]\d+)?[kMGT]?( [\w/%]+| at [\d,]+)?")


def render(template: str, **content: Any) -> str:
    """Make a page from a template next to this file. `content` has the template's variables.

    All text is escaped. Characters that a page must not contain are removed.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.tests["a_number"] = _is_a_number
    html = environment.get_template(template).render(**content)
    return _CONTROL.sub("\ufffd", html)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f]")
"""Characters that a page must not contain: control characters except tab and newline."""


def _is_a_number(cell: object) -> bool:
    """Return whether a table cell holds a number, which is right-aligned."""
    return bool(_NUMBER.fullmatch(str(cell)))


def _content(run: RunRecords, facts: Sequence[Fact], *, folder: Path) -> dict[str, Any]:
    events = run.history.events
    samples = run.history.samples
    shown_samples = []
    for sample in reversed(spread(samples, most=_MAX_SAMPLES)):
        text = cut(sample.text)
        prompt = cut(sample.prompt)
        shown_samples.append(sample._replace(text=text, prompt=prompt))
    step_ms = recent(run.history.train, "step_ms")
    recoveries = recoveries_of(events, step_ms=step_ms)
    goodput = goodput_of(run.history, step_ms=step_ms)
    scores = read_scores(run.path)
    loss_parts = read_loss_parts(run.path)
    score_pictures = memory_sweep(scores)
    score_pictures += part_pictures(loss_parts)
    return {
        "title": f"Run {run.name}",
        "run": run,
        "lead": lead(run),
        "facts": [fact for fact in facts if fact.name != "State"],
        "marks": marks_explained(run),
        "groups": pictures_of(run),
        "score_rows": _score_rows(scores),
        "score_pictures": score_pictures,
        "recovery_rows": recovery_rows(recoveries),
        "recovery_sentences": goodput_sentences(goodput, lost=lost_time(recoveries)) if goodput else [],
        "event_rows": _event_rows(events),
        "event_counts": Counter(event.name for event in events),
        "samples": shown_samples,
        "num_samples": len(samples),
        "setting_rows": setting_rows([run.settings, defaults()], ["this run", "default"]),
        "files": _links(run.path, folder=folder),
    }


def cut(text: str, *, most: int = _MAX_TEXT) -> str:
    """Cut off the end of a text that is longer than `most` characters."""
    num_cut = len(text) - most
    if num_cut <= 0:
        return text
    rest = counted(num_cut, "character")
    return f"{text[:most]}... ({rest} more)"


def _event_rows(events: Sequence[Event]) -> list[list[str]]:
    """Return table rows of the events that a page shows, in the order in which they occurred. If there are too many
    events, important events are kept before others, and newer events before older events."""

    def weight(index: int) -> tuple[bool, int]:
        is_ordinary = events[index].name in _ORDINARY
        return is_ordinary, -index

    by_weight = sorted(range(len(events)), key=weight)
    rows = [["event", "step", "after", "details"]]
    for index in sorted(by_weight[:_MAX_EVENTS]):
        event = events[index]
        details = event_details(event.name, event.fields)
        rows.append(
            [
                event.name.replace("_", " "),
                f"{event.step:,}",
                format_duration(3600 * event.hours),
                cut(details, most=300),
            ]
        )
    return rows


def _score_rows(scores: Scores) -> list[list[str]]:
    columns = {"loss": "nats/token", "ppl": "perplexity", "bits_per_byte": "bits/byte", "tokens": "tokens"}
    if any("accuracy_pct" in values for values in scores.values()):
        columns["accuracy_pct"] = "accuracy, %"
    rows = [["", *columns.values()]]
    for name, values in scores.items():
        row = [name]
        for key in columns:
            if key == "tokens":
                num_digits = 0
            else:
                num_digits = 4
            number = fixed(values.get(key), num_digits)
            row.append(number or "-")
        rows.append(row)
    return rows


def setting_rows(known: Sequence[dict[str, Any]], names: Sequence[str]) -> list[list[str]]:
    """Return table rows of the settings in which some runs differ, with a column per run.

    `known` has the settings of each run, and `names` has the runs' names. A setting that a run lacks counts as the
    default.
    """
    usual = defaults()
    foreign = set()
    for settings in known:
        foreign |= settings.keys() - usual.keys()
    rows = [["setting", *names]]
    for key in [*usual, *sorted(foreign)]:
        default = usual.get(key, "unknown to this version")
        row = [key]
        distinct = set()
        for settings in known:
            if settings:
                value = settings.get(key, default)
            else:
                value = "unknown"
            distinct.add(json.dumps(value, default=str))
            row.append(cut(str(value), most=200))
        if len(distinct) > 1:
            rows.append(row)
    return rows


def _links(run_dir: Path, *, folder: Path) -> list[tuple[str, str]]:
    """Return (name, relative address) of each file in the run's folder to which the page links."""
    base = os.path.relpath(run_dir.resolve(), folder.resolve())
    links = []
    for name in _FILES:
        if (run_dir / name).exists():
            address = os.path.join(base, name).removeprefix("./")
            links.append((name, quote(address)))
    return links
