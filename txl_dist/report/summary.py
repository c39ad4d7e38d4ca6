"""Summary of a run from its records, settings, newest checkpoint and state. It needs neither torch nor a GPU.

`read_run` takes a run directory in any state: in progress, crashed, copied, or written by an older version. A file that
cannot be read is left out and reported. Only a run without records is an error. `facts_of` makes the facts at the top
of the report.
"""

from __future__ import annotations

import math
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from txl_dist.artifacts import DONE, LOCK, SETTINGS, STATE, list_checkpoints
from txl_dist.config.load import Config, flat
from txl_dist.config.renamed import flat_in_new_names
from txl_dist.console.formatting import (
    bounded,
    cluster_starts,
    counted,
    format_count,
    format_duration,
    format_table,
    printable,
)
from txl_dist.distributed.processes import process_of
from txl_dist.io.files import parse_object, parse_toml, read_bytes, read_json
from txl_dist.report.records import BITS, MOST, FloatArray, History, RecordTable, read_history
from txl_dist.report.recoveries import goodput_of, lost_time, recoveries_of

_LOCK_IS_OLD_AFTER_S = 60.0
"""Seconds after which an unchanged lock means that its job on another machine has ended. A running job touches its lock
every few seconds."""
_RECENT = 100
"""Number of newest records that count for the present speed, which is the median of their speeds."""
_IN_PROGRESS = "going on"
TROUBLES = {
    "rewound": "rewound",
    "spike": "spikes",
    "skipped": "skipped steps",
    "straggler": "stragglers",
    "recovered": "recoveries",
    "save_failed": "failed saves",
}
"""Words of the report for events that mean trouble, by the name of the event."""


class Fact(NamedTuple):
    """Fact of the summary, shown as one row of the report: the fact's name, its value, and a note."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class RunRecords:
    """Records, settings, newest checkpoint and state of a run, as `read_run` reads them."""

    path: Path
    history: History
    settings: dict[str, Any]
    """Settings of config.toml by `section.key`. Empty if they cannot be read."""
    settings_problem: str
    """Reason why the settings cannot be read. Empty if they can be read."""
    checkpoint: dict[str, Any]
    """Content of state.json of the newest readable checkpoint. Empty if there is none."""
    state: str
    """State of the run in words for people, such as done, running or stopped."""

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.path.resolve().name

    @property
    def max_steps(self) -> int | None:
        """Number of steps of the whole run. None if the settings do not contain it."""
        value: object = self.settings.get("train.max_steps")
        if _is_count(value):
            return value
        return None

    @property
    def tokenizer(self) -> str | None:
        """Fingerprint of the tokenizer. None if no checkpoint has it."""
        value = self.checkpoint.get("tokenizer_fingerprint")
        if isinstance(value, str):
            return value
        return None

    def tokens_at(self, steps: FloatArray) -> FloatArray:
        """Return the number of tokens seen at each step, as an array. Values between two train records are
        interpolated.

        The value is NaN for a step whose number of tokens is unknown.
        """
        train = self.history.train
        has_tokens = np.isfinite(train["tokens_seen"])
        if not has_tokens.any():  # records from before tokens were counted
            return steps * self._tokens_per_step()
        recorded_steps = np.concatenate(([0.0], train["step"][has_tokens]))
        recorded_tokens = np.concatenate(([0.0], train["tokens_seen"][has_tokens]))
        return np.interp(steps, recorded_steps, recorded_tokens)

    def _tokens_per_step(self) -> float:
        """Return the number of tokens per step that the settings give, or NaN if the number is unknown."""
        num_lanes = self.settings.get("train.num_lanes")
        segment_len = self.settings.get("train.reuse_len") or self.settings.get("train.segment_len")
        if _is_count(num_lanes) and _is_count(segment_len):
            return float(num_lanes) * float(segment_len)
        return math.nan

    @property
    def start(self) -> dict[str, Any]:
        """Record of the newest start of the run: number of ranks, device and versions. Empty if there is none."""
        starts = [event.fields for event in self.history.events if event.name == "start"]
        if starts:
            return starts[-1]
        return {}

    @property
    def no_bits(self) -> dict[str, str]:
        """Reasons why losses are not in bits per byte, by kind of record. Empty for runs of older versions."""
        reasons = self.start.get("no_bits")
        if not isinstance(reasons, dict):
            return {}
        return {printable(str(kind)): printable(str(reason)) for kind, reason in reasons.items()}

    @property
    def parameters(self) -> int | None:
        """Number of the model's parameters. None if neither the start record nor a checkpoint has it."""
        number: object = self.start.get("parameters")
        if number is None:
            with suppress(KeyError, TypeError, AttributeError):
                number = sum(math.prod(shape) for shape in self.checkpoint["parameters"].values())
        if _is_count(number):
            return number
        return None


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value <= MOST


def read_run(path: Path) -> RunRecords:
    """Read everything in a run's folder that the report needs. Raises DataError if there are no records."""
    history = read_history(path)
    settings, problem = read_settings(path)
    return RunRecords(path, history, settings, problem, _newest_state(path), _state_of(path, history))


def read_settings(folder: Path) -> tuple[dict[str, Any], str]:
    """Return (settings of a run or checkpoint by `section.key`, the reason if they cannot be read).

    The settings may come from any version of the program, so they are not checked.
    """
    path = folder / SETTINGS
    try:
        sections = parse_toml(read_bytes(path))
    except (OSError, ValueError) as error:
        return {}, f"{path.name} cannot be read ({getattr(error, 'strerror', None) or error})."
    settings = {}
    for section, values in sections.items():
        if not isinstance(values, dict):
            values = {"": values}
        for key, value in values.items():
            settings[f"{section}.{key}"] = value
    return flat_in_new_names(settings), ""


def defaults() -> dict[str, Any]:
    """Return the default of every setting by `section.key`, as a TOML value."""
    return dict(flat(Config()))


def _newest_state(path: Path) -> dict[str, Any]:
    for folder in reversed(list_checkpoints(path)):
        with suppress(OSError, ValueError):
            return parse_object(read_bytes(folder / STATE))
    return {}


def _state_of(path: Path, history: History) -> str:
    if (path / DONE).exists():
        return "done"
    is_alive = _is_locked(path / LOCK)
    if is_alive:
        return _IN_PROGRESS
    if history.events:
        last = history.events[-1]
    else:
        last = None
    if last is not None and last.name == "stopped":
        reason = last.fields.get("reason")
        if reason:
            by = f" by {reason}"
        else:
            by = ""
        return f"stopped{by}; the same command continues"
    if is_alive is None:
        return "not done, and no job works on it; log.txt says why, and the same command continues"
    return "crashed or killed: its job ended without a message; the same command continues"


def _is_locked(path: Path) -> bool | None:
    """Return whether the job that locked the run is alive. Returns None if the run is not locked."""
    try:
        age_s = time.time() - path.stat().st_mtime
        is_alive = process_of(read_json(path)["process"]).lives()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if is_alive is None:  # a process of another machine
        return age_s < _LOCK_IS_OLD_AFTER_S
    return is_alive


def corpus_name(kind: str) -> str:
    """Return the name of a validation split for people, from its kind of record.

    The kind is `eval` for the first corpus, and `eval_NAME` for another corpus.
    """
    if kind == "eval":
        return "validation"
    return f"validation {kind.removeprefix('eval_')}"


def recent(table: RecordTable, name: str) -> float | None:
    """Return the median of the newest numbers in a column, or None if it has no number."""
    column = table[name]
    values = column[np.isfinite(column)][-_RECENT:]
    if len(values):
        return float(np.median(values))
    return None


def best(table: RecordTable, column: str = "loss") -> tuple[float, int] | None:
    """Return (lowest value of a column, its step), or None if the column has no number."""
    if not table.has(column):
        return None
    index = int(np.nanargmin(table[column]))
    return float(table[column][index]), int(table["step"][index])


def _perplexity(loss: float) -> str:
    return format_count(math.exp(min(loss, 700.0)))


def lead(run: RunRecords) -> str:
    """Return a sentence about the run: its state, and its last validation loss."""
    state = f"{run.state[:1].upper()}{run.state[1:]}."
    loss = run.history.held_out.last("loss")
    if loss is None:
        return state
    return f"{state} Last validation loss {bounded(loss)} nats per token, perplexity {_perplexity(loss)}."


_LEAST_ROUNDED = 10_000
"""Smallest number of parameters that is shown rounded. A smaller number is shown exactly."""


def facts_of(run: RunRecords) -> list[Fact]:
    """Return the facts at the top of a run's report: model and data, progress, losses, speed and ranks.

    A fact or a note with an unknown value is left out.
    """
    recorded = run.settings | run.checkpoint | run.start
    facts = [
        *_subject_facts(run, recorded),
        *_progress_facts(run),
        *_loss_facts(run),
        *_speed_facts(run.history),
        *_start_facts(run, recorded),
    ]
    return [fact for fact in facts if fact.value]


def _fact(name: str, value: str | None, *notes: str | None) -> Fact:
    """Make a fact, and join its known notes by commas. An unknown value of None becomes an empty value."""
    known_notes = [note for note in notes if note is not None]
    return Fact(name, value or "", ", ".join(known_notes))


def _text(value: object) -> str | None:
    """Return a recorded value as text, with thousands separated. Returns None if the value is unknown."""
    if value is None:
        return None
    if type(value) is int:
        return f"{value:,}"
    return str(value)


def _phrase(form: str, value: object) -> str | None:
    """Put a recorded value in the place {} of a phrase. Returns None if the value is unknown."""
    text = _text(value)
    if text is None:
        return None
    return form.format(text)


def _subject_facts(run: RunRecords, recorded: dict[str, Any]) -> Iterator[Fact]:
    """Yield the facts on the model, its data and the program. Recorded values may have any type."""
    paths = _data_paths(recorded)
    corpora = _list_of(run.start.get("corpora")) or [Path(path).name for path in paths]
    yield _fact("State", run.state)
    yield _fact("Corpus", ", ".join(map(str, corpora)), ", ".join(paths))
    yield _fact("Tokenizer", _phrase("{} ids", recorded.get("vocab_size")), _text(recorded.get("tokenizer")))
    yield _model_fact(run.parameters, recorded)
    yield _fact(
        "Memory",
        _count(recorded.get("train.memory_len"), "token"),
        _phrase("segments of {}", _count(recorded.get("train.segment_len"), "token")),
        _count(recorded.get("train.num_lanes"), "lane"),
    )
    yield from _program_facts(recorded)
    yield _fact("Type of the weights", _text(recorded.get("dtype")))
    yield _fact("Command", shlex.join(map(str, _list_of(recorded.get("command")))))


def _data_paths(recorded: dict[str, Any]) -> list[str]:
    """List the paths of all corpora that the settings name."""
    paths = [recorded.get("data.path"), *_list_of(recorded.get("data.more_paths"))]
    return [str(path) for path in paths if path]


def _model_fact(num_parameters: int | None, recorded: dict[str, Any]) -> Fact:
    """Return the fact about the model's size and shape."""
    size, exact_size = _sizes(num_parameters)
    return _fact(
        "Model",
        size,
        exact_size,
        _count(recorded.get("model.num_layers"), "layer"),
        _phrase("width {}", recorded.get("model.width")),
        _count(recorded.get("model.num_heads"), "head"),
        _phrase("{} positions", recorded.get("model.positions")),
        _phrase("feed-forward width {}", recorded.get("model.ff_width")),
        _softmax(recorded.get("model.cutoffs")),
    )


def _program_facts(recorded: dict[str, Any]) -> Iterator[Fact]:
    """Yield facts on the program and its libraries. The program is identified by its commit, or by its version if the
    commit is unknown."""
    version = recorded.get("txl_dist", recorded.get("code_version"))
    commit = recorded.get("commit")
    version_note = _phrase("txl_dist {}", version)
    libraries = (
        _phrase("torch {}", recorded.get("torch")),
        _phrase("DeepSpeed {}", recorded.get("deepspeed")),
        _phrase("ZeRO-{}", recorded.get("zero_stage")),
        _text(recorded.get("engine.precision", recorded.get("precision"))),
    )
    yield _fact("Commit", _text(commit), version_note, *libraries)
    if not commit:
        yield _fact("Made by", version_note, *libraries)


def _progress_facts(run: RunRecords) -> Iterator[Fact]:
    """Yield the facts on steps, tokens and time."""
    history = run.history
    step = history.step
    total = run.max_steps
    share = None
    if total:
        share = f"of {_text(run.settings['train.max_steps'])} ({100 * min(step / total, 1):.0f} %)"
    tokens = float(run.tokens_at(np.array([float(step)]))[0])
    steps_left = max((total or 0) - step, 0)
    left_s = steps_left * (recent(history.train, "step_ms") or 0.0) / 1000
    if history.num_records:
        yield _fact("Step", _text(step), share)
        if math.isfinite(tokens):
            yield _fact("Tokens seen", format_count(tokens), f"{tokens:,.0f}")
    if history.hours:
        yield _fact("Working time", format_duration(3600 * history.hours), "without pauses between starts")
    if left_s and run.state == _IN_PROGRESS:
        yield _fact("Time left", format_duration(left_s), "at the present speed")


def _speed_facts(history: History) -> Iterator[Fact]:
    """Yield the facts on speed and GPU memory, from the newest train records."""
    train = history.train
    median_note = f"median of the last {min(len(train), _RECENT)} records"
    yield _fact("Speed", _phrase("{} tokens/s", fixed(recent(train, "tokens_per_s"), 0)), median_note)
    yield _fact("MFU", _phrase("{} %", fixed(recent(train, "mfu_pct"), 1)), "of the devices' peak")
    yield _fact("Time per step", _phrase("{} ms", fixed(recent(train, "step_ms"), 1)), median_note)
    data_wait = _phrase("{} %", fixed(recent(train, "data_wait_pct"), 1))
    yield _fact("Waiting for data", data_wait, "of the time of the slowest rank")
    yield _fact("Peak memory", _phrase("{} GiB", fixed(train.last("peak_gib"), 2)), "of the fullest rank")
    yield from _slowest_rank_facts(history)


def _start_facts(run: RunRecords, recorded: dict[str, Any]) -> Iterator[Fact]:
    """Yield the facts on ranks, restarts and events that mean trouble."""
    history = run.history
    ranks_at_start = recorded.get("ranks")
    ranks = _ranks_after_recovery(history) or ranks_at_start
    yield _fact(
        "Ranks",
        _text(ranks),
        _phrase("at the start: {}", ranks_at_start) if ranks != ranks_at_start else None,
        _phrase("hosts: {}", recorded.get("hosts")),
        _text(recorded.get("device")),
        _phrase("threads per rank: {}", recorded.get("threads_per_rank")),
    )
    events = Counter(event.name for event in history.events)
    troubles = {name: events[event] for event, name in TROUBLES.items()}
    troubles["records superseded by later records"] = history.num_superseded
    troubles["incomplete lines in metrics.jsonl"] = history.num_damaged
    listed = ", ".join(f"{name} {number:,}" for name, number in troubles.items() if number)
    yield _fact("Resumed", _times_resumed(events["start"]), listed)
    yield from _recovery_facts(history)
    with suppress(ValueError, OverflowError, OSError):
        last_record = datetime.fromtimestamp(history.last_time_s, UTC)
        yield _fact("Last record", f"{last_record:%Y-%m-%d %H:%M} UTC")


def _ranks_after_recovery(history: History) -> int | None:
    """Return the number of ranks after the newest recovery since the last start. Returns None if there was none, or if
    the number is unknown."""
    for event in reversed(history.events):
        if event.name == "start":
            return None
        ranks = event.fields.get("world_size")
        if event.name == "recovered" and _is_count(ranks):
            return ranks
    return None


def _recovery_facts(history: History) -> Iterator[Fact]:
    """Yield a fact about the time that recoveries took, and about the goodput with and without them."""
    step_ms = recent(history.train, "step_ms")
    recoveries = recoveries_of(history.events, step_ms=step_ms)
    if not recoveries:
        return
    goodput = goodput_of(history, step_ms=step_ms)
    if goodput is None:
        note = None
    else:
        note = f"goodput {goodput.with_pct:.2f} %, with restarts at most {goodput.without_pct:.2f} % (estimate)"
    yield _fact("Recoveries", f"{len(recoveries):,}", f"lost: {lost_time(recoveries)}", note)


def _times_resumed(num_starts: int) -> str | None:
    """Say how often a run was resumed, from its number of starts. Returns None if no start is recorded."""
    if num_starts == 0:
        return None
    if num_starts == 1:
        return "never"
    if num_starts == 2:
        return "once"
    return f"{num_starts - 1} times"


def fact_lines(facts: Sequence[Fact]) -> list[str]:
    """Format facts as lines for a terminal."""
    rows = [["", ""]]
    rows += [[fact.name, printable(f"{fact.value}  {fact.note}")] for fact in facts]
    return format_table(rows)[1:]


def _sizes(num_parameters: int | None) -> tuple[str | None, str | None]:
    """Return the number of parameters as two texts, rounded and exact. For a small number, the first text is exact and
    the second is None."""
    if not num_parameters:
        return None, None
    if num_parameters < _LEAST_ROUNDED:
        return counted(num_parameters, "parameter"), None
    return f"{format_count(num_parameters)} parameters", f"{num_parameters:,} exactly"


def _count(value: object, noun: str) -> str | None:
    """Return a count with its noun. Returns None if the count is unknown, or has another type in a damaged file."""
    if value is None:
        return None
    if type(value) is int:
        return counted(value, noun)
    return f"{value} {noun}s"


def _softmax(cutoffs: object) -> str | None:
    """Name the kind of softmax for people, from the setting `model.cutoffs`. Returns None if it is unknown."""
    if not isinstance(cutoffs, list):
        return None
    if not cutoffs:
        return "plain softmax"
    return f"adaptive softmax, {cluster_starts(cutoffs)}"


def _list_of(value: object) -> list[Any]:
    if isinstance(value, list):
        return value
    return []


def _slowest_rank_facts(history: History) -> Iterator[Fact]:
    """Yield a fact about the rank that was most often the slowest: how often it was the slowest, and by how much."""
    slowest = history.train["slowest_rank"]
    delay_pct = history.train["slowest_pct"]
    ranks, counts = np.unique(slowest[np.isfinite(slowest)], return_counts=True)
    if not len(ranks):
        return
    rank = int(ranks[counts.argmax()])
    if rank in history.hosts:
        host = f" on {history.hosts[rank]}"
    else:
        host = ""
    share = f"in {100 * counts.max() / counts.sum():.0f} % of the records"
    delays = delay_pct[(slowest == rank) & np.isfinite(delay_pct)]
    if len(delays):
        delay = f"slower there by {np.median(delays):.1f} % (median)"
    else:
        delay = None
    yield _fact("Slowest rank", f"{rank}{host}", share, delay)


def _loss_facts(run: RunRecords) -> Iterator[Fact]:
    """Yield the newest loss of training and of each validation split, in nats per token."""
    history = run.history
    if run.start.get("token") == "word":
        per_word = " per word"
    else:
        per_word = ""
    for kind, table in {"train": history.train, **history.evals}.items():
        if kind == "train":
            name = "training"
        else:
            name = corpus_name(kind)
        loss = table.last("loss")
        lowest = best(table)
        if loss is None or lowest is None:
            continue
        notes = ["nats per token", f"perplexity {_perplexity(loss)}{per_word}"]
        for column, unit in BITS.items():
            bits = table.last(column)
            if bits is not None:
                notes.append(f"{bounded(bits)} {unit}")
        unknown_pct = table.last("unknown_pct")
        if unknown_pct:
            notes.append(f"{unknown_pct:.2f} % of the tokens unknown")
        reason = run.no_bits.get(kind)
        if reason:
            notes.append(f"no bits per byte: {reason}")
        lowest_loss, lowest_step = lowest
        if table is not history.train and lowest_loss < loss:
            notes.append(f"best: {bounded(lowest_loss)} at step {lowest_step:,}")
        yield Fact(f"{name[:1].upper()}{name[1:]} loss", bounded(loss), "; ".join(notes))


def fixed(value: float | None, digits: int) -> str | None:
    """Return a number as text with `digits` decimals and with thousands separated. Returns None for None."""
    if value is None:
        return None
    return f"{value:,.{digits}f}"
