"""A run at a glance: its records, settings and newest checkpoint, and what became of it. Needs neither torch nor a GPU.

`read_run` takes a run directory in any state: in progress, crashed, copied from elsewhere, of an older version. What
cannot be read is left out, and said; only a run without records is an error.
"""

from __future__ import annotations

import math
import shlex
import time
from collections import Counter
from collections.abc import Sequence
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

_LOCK_IS_OLD_AFTER_S = 60.0
"""A job on another machine touches its lock every few seconds."""
_RECENT = 100
"""Records that a present speed is the median of."""
TROUBLES = {"rewound": "rewound", "spike": "spikes", "skipped": "skipped steps", "straggler": "stragglers",
            "save_failed": "failed saves"}  # fmt: skip
"""Events, and what people call them."""


class Fact(NamedTuple):
    """A line of the summary."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class RunRecords:
    """What is known of a run."""

    path: Path
    history: History
    settings: dict[str, Any]
    """By `section.key`, as config.toml has them; empty if it cannot be read."""
    settings_problem: str
    """Why not."""
    checkpoint: dict[str, Any]
    """state.json of the newest checkpoint that has a readable one; else empty."""
    state: str
    """done, going on, stopped ..., for people."""

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.path.resolve().name

    @property
    def max_steps(self) -> int | None:
        """Steps that the run is to have."""
        value: object = self.settings.get("train.max_steps")
        return value if _is_count(value) else None

    @property
    def tokenizer(self) -> str | None:
        """Fingerprint of its tokenizer, if a checkpoint tells it."""
        value = self.checkpoint.get("tokenizer_fingerprint")
        return value if isinstance(value, str) else None

    def tokens_at(self, steps: FloatArray) -> FloatArray:
        """Tokens seen at steps, interpolated between train records."""
        train = self.history.train
        known = np.isfinite(train["tokens_seen"])
        if not known.any():  # records from before tokens were counted
            sizes = [self.settings.get(key) for key in ("train.num_lanes", "train.segment_len")]
            return steps * math.prod(float(size) if _is_count(size) else math.nan for size in sizes)
        at, tokens = (np.concatenate(([0.0], train[name][known])) for name in ("step", "tokens_seen"))
        return np.interp(steps, at, tokens)

    @property
    def start(self) -> dict[str, Any]:
        """What the newest start recorded: ranks, device, versions."""
        starts = [event.fields for event in self.history.events if event.name == "start"]
        return starts[-1] if starts else {}

    @property
    def no_bits(self) -> dict[str, str]:
        """Why losses are not told in bits per byte, by kind of record; those of older programs have no such word."""
        value = self.start.get("no_bits")
        known = value.items() if isinstance(value, dict) else ()
        return {printable(str(kind)): printable(str(reason)) for kind, reason in known}

    @property
    def parameters(self) -> int | None:
        """Number of weights, if the start or a checkpoint tells it."""
        found: object = self.start.get("parameters")
        if found is None:
            with suppress(KeyError, TypeError, AttributeError):
                found = sum(math.prod(shape) for shape in self.checkpoint["parameters"].values())
        return found if _is_count(found) else None


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value <= MOST


def read_run(path: Path) -> RunRecords:
    """Raises DataError if there are no records."""
    history = read_history(path)
    settings, problem = read_settings(path)
    return RunRecords(path, history, settings, problem, _newest_state(path), _state_of(path, history))


def read_settings(folder: Path) -> tuple[dict[str, Any], str]:
    """(config.toml of a run or checkpoint by `section.key`, why it cannot be read): of any version, so not checked."""
    path = folder / SETTINGS
    try:
        sections = parse_toml(read_bytes(path))
    except (OSError, ValueError) as error:
        return {}, f"{path.name} cannot be read ({getattr(error, 'strerror', None) or error})."
    parts = {section: values if isinstance(values, dict) else {"": values} for section, values in sections.items()}
    settings = {f"{section}.{key}": value for section, values in parts.items() for key, value in values.items()}
    return flat_in_new_names(settings), ""


def defaults() -> dict[str, Any]:
    """Every setting's default by `section.key`, as TOML would have it."""
    return dict(flat(Config()))


def _newest_state(path: Path) -> dict[str, Any]:
    for folder in reversed(list_checkpoints(path)):
        with suppress(OSError, ValueError):
            return parse_object(read_bytes(folder / STATE))
    return {}


def _state_of(path: Path, history: History) -> str:
    if (path / DONE).exists():
        return "done"
    lives = _is_locked(path / LOCK)
    if lives:
        return "going on"
    last = history.events[-1] if history.events else None
    if last is not None and last.name == "stopped":
        reason = last.fields.get("reason")
        return f"stopped{f' by {reason}' if reason else ''}; the same command goes on"
    if lives is None:
        return "not done, and no job works on it; log.txt tells why, and the same command goes on"
    return "crashed or killed: its job is gone without a word; the same command goes on"


def _is_locked(path: Path) -> bool | None:
    """Whether the job that holds the run lives; None if none holds it."""
    try:
        age_s = time.time() - path.stat().st_mtime
        lives = process_of(read_json(path)["process"]).lives()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return age_s < _LOCK_IS_OLD_AFTER_S if lives is None else lives


def corpus_name(kind: str) -> str:
    """`eval` is the held-out split of the first corpus, `eval_NAME` that of another."""
    return "held-out" if kind == "eval" else f"held-out {kind.removeprefix('eval_')}"


def recent(table: RecordTable, name: str) -> float | None:
    """The median of a column's newest numbers."""
    values = table[name][np.isfinite(table[name])][-_RECENT:]
    return float(np.median(values)) if len(values) else None


def best(table: RecordTable, column: str = "loss") -> tuple[float, int] | None:
    """(lowest value of a column, its step); None if there is none."""
    if not table.has(column):
        return None
    index = int(np.nanargmin(table[column]))
    return float(table[column][index]), int(table["step"][index])


def _perplexity(loss: float) -> str:
    return format_count(math.exp(min(loss, 700.0)))


def lead(run: RunRecords) -> str:
    """The run in a sentence."""
    loss = run.history.held_out.last("loss")
    last = (
        "" if loss is None else f" Last held-out loss {bounded(loss)} nats per token, perplexity {_perplexity(loss)}."
    )
    return f"{run.state[:1].upper()}{run.state[1:]}.{last}"


_TOOLS = ("torch %(torch)s", "DeepSpeed %(deepspeed)s", "ZeRO-%(zero_stage)s", "%(precision)s")
_SHAPE = ("%(layers)s", "width %(model.width)s", "%(heads)s",
          "%(model.positions)s positions", "feed-forward width %(model.ff_width)s", "%(softmax)s")  # fmt: skip
_SEGMENTS = ("segments of %(segment)s", "%(lanes)s")
_LEAST_ROUNDED = 10_000
"""Parameters from which a rounded number is shorter than the exact one."""
_Forms = Sequence[tuple[str, str, Sequence[str]]]
_SUBJECT: _Forms = (
    ("State", "%(state)s", ()),
    ("Corpus", "%(corpora)s", ["%(paths)s"]),
    ("Tokenizer", "%(vocab_size)s ids", ["%(tokenizer)s"]),
    ("Model", "%(size)s", ["%(exactly)s", *_SHAPE]),
    ("Memory", "%(memory)s", _SEGMENTS),
    ("Commit", "%(commit)s", ["txl_dist %(version)s", *_TOOLS]),
    ("Made by", "txl_dist %(unknown_commit_of)s", _TOOLS),
    ("Type of the weights", "%(dtype)s", ()),
    ("Command", "%(command)s", ()),
    ("Step", "%(step)s", ["of %(train.max_steps)s (%(done)s)"]),
    ("Tokens seen", "%(tokens)s", ["%(all_tokens)s"]),
    ("Working time", "%(work)s", ["without pauses between starts"]),
    ("Time left", "%(left)s", ["at the present speed"]),
)
_COURSE: _Forms = (
    ("Speed", "%(tokens_per_s)s tokens/s", ["median of the last %(recent)s records"]),
    ("MFU", "%(mfu_pct)s %%", ["of the devices' peak"]),
    ("Time per step", "%(step_ms)s ms", ["median of the last %(recent)s records"]),
    ("Waiting for data", "%(data_wait_pct)s %%", ["of the time of the slowest rank"]),
    ("Peak memory", "%(peak_gib)s GiB", ["of the fullest rank"]),
    ("Slowest rank", "%(slowest)s", ["in %(slowest_share)s of the records", "there by %(slowest_by)s (median)"]),
    ("Ranks", "%(ranks)s", ["hosts: %(hosts)s", "%(device)s", "threads per rank: %(threads_per_rank)s"]),
    ("Resumed", "%(resumed)s", ["%(troubles)s"]),
    ("Last record", "%(last_record)s", ()),
)
"""The tiles: name, value and notes, with what is known (`_known`) in place; one without its value is left out, and of
the notes those are told whose values are known. Between the two the losses stand."""


def facts_of(run: RunRecords) -> list[Fact]:
    """The headline: what is trained on what, how far it is, how well, how fast, where."""
    known = {key: f"{value:,}" if type(value) is int else value for key, value in _known(run).items()}

    def told(*forms: str) -> str:
        texts = []
        for form in forms:
            with suppress(KeyError):
                texts.append(form % known)
        return ", ".join(texts)

    subject, course = (
        [Fact(name, told(value), told(*notes)) for name, value, notes in forms] for forms in (_SUBJECT, _COURSE)
    )
    return [fact for fact in (*subject, *_losses(run), *course) if fact.value]


def fact_lines(facts: Sequence[Fact]) -> list[str]:
    """For a terminal."""
    return format_table([["", ""], *([fact.name, printable(f"{fact.value}  {fact.note}")] for fact in facts)])[1:]


def _known(run: RunRecords) -> dict[str, Any]:
    """Values of tiles by name; those of the run may be anything, as nothing of it is checked here."""
    history, total, step = run.history, run.max_steps, run.history.step
    known = run.settings | run.checkpoint | run.start
    version = known.get("txl_dist", known.get("code_version"))
    paths = [str(path) for path in (known.get("data.path"), *_list_of(known.get("data.more_paths"))) if path]
    corpora = _list_of(run.start.get("corpora")) or [Path(path).name for path in paths]
    tokens = float(run.tokens_at(np.array([float(step)]))[0])
    left_s = max((total or 0) - step, 0) * (recent(history.train, "step_ms") or 0.0) / 1000
    events = Counter(event.name for event in history.events)
    troubles = {name: events[event] for event, name in TROUBLES.items()} | {
        "records superseded by later ones": history.num_superseded,
        "torn lines in metrics.jsonl": history.num_damaged,
    }
    found = {
        "state": run.state,
        "corpora": ", ".join(map(str, corpora)),
        "paths": ", ".join(paths),
        **_parameters(run.parameters),
        "layers": _some(known.get("model.num_layers"), "layer"),
        "heads": _some(known.get("model.num_heads"), "head"),
        "segment": _some(known.get("train.segment_len"), "token"),
        "memory": _some(known.get("train.memory_len"), "token"),
        "lanes": _some(known.get("train.num_lanes"), "lane"),
        "softmax": _softmax(known.get("model.cutoffs")),
        "version": version,
        "unknown_commit_of": None if known.get("commit") else version,
        "command": shlex.join(map(str, _list_of(known.get("command")))),
        "step": step if history.num_records else None,
        "recent": min(len(history.train), _RECENT),
        "done": f"{100 * min(step / total, 1):.0f} %" if total else None,
        "tokens": format_count(tokens) if math.isfinite(tokens) and history.num_records else None,
        "all_tokens": f"{tokens:,.0f}",
        "work": format_duration(3600 * history.hours) if history.hours else None,
        "left": format_duration(left_s) if left_s and run.state == "going on" else None,
        "peak_gib": fixed(history.train.last("peak_gib"), 2),
        "resumed": {0: None, 1: "never", 2: "once"}.get(events["start"], f"{events['start'] - 1} times"),
        "troubles": ", ".join(f"{name} {number:,}" for name, number in troubles.items() if number),
        **{name: fixed(recent(history.train, name), 1) for name in ("mfu_pct", "step_ms", "data_wait_pct")},
        "tokens_per_s": fixed(recent(history.train, "tokens_per_s"), 0),
        **_slowest(history),
    }
    with suppress(ValueError, OverflowError, OSError):
        found["last_record"] = f"{datetime.fromtimestamp(history.last_time_s, UTC):%Y-%m-%d %H:%M} UTC"
    return {name: value for name, value in (known | found).items() if value is not None}


def _parameters(number: int | None) -> dict[str, str]:
    """The number of parameters, rounded and exact; a small one is exact alone."""
    if not number:
        return {}
    if number < _LEAST_ROUNDED:
        return {"size": counted(number, "parameter")}
    return {"size": f"{format_count(number)} parameters", "exactly": f"{number:,} exactly"}


def _some(value: object, noun: str) -> str | None:
    """A count with its noun, and what is no number, as in a damaged file, as it is. None where it is unknown."""
    if value is None:
        return None
    return counted(value, noun) if type(value) is int else f"{value} {noun}s"


def _softmax(cutoffs: object) -> str | None:
    """The kind of softmax by `model.cutoffs`, for people; None where it is unknown."""
    if not isinstance(cutoffs, list):
        return None
    if not cutoffs:
        return "plain softmax"
    return f"adaptive softmax, {cluster_starts(cutoffs)}"


def _list_of(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _slowest(history: History) -> dict[str, str]:
    """Which rank was the slowest, how often and by how much."""
    slowest, behind = history.train["slowest_rank"], history.train["slowest_pct"]
    ranks, counts = np.unique(slowest[np.isfinite(slowest)], return_counts=True)
    if not len(ranks):
        return {}
    rank = int(ranks[counts.argmax()])
    host = f" on {history.hosts[rank]}" if rank in history.hosts else ""
    pct = behind[(slowest == rank) & np.isfinite(behind)]
    by = {"slowest_by": f"{np.median(pct):.1f} %"} if len(pct) else {}
    return {"slowest": f"{rank}{host}", "slowest_share": f"{100 * counts.max() / counts.sum():.0f} %"} | by


def _losses(run: RunRecords) -> list[Fact]:
    history, facts = run.history, []
    for kind, table in {"train": history.train, **history.evals}.items():
        name = "training" if kind == "train" else corpus_name(kind)
        loss, lowest = table.last("loss"), best(table)
        if loss is None or lowest is None:
            continue
        per_word = " per word" if run.start.get("token") == "word" else ""
        notes = ["nats per token", f"perplexity {_perplexity(loss)}{per_word}"]
        notes += [f"{bounded(value)} {unit}" for key, unit in BITS.items() if (value := table.last(key)) is not None]
        notes += [f"{unknown:.2f} % of the tokens unknown"] if (unknown := table.last("unknown_pct")) else []
        notes += [f"no bits per byte: {reason}"] if (reason := run.no_bits.get(kind)) else []
        if table is not history.train and lowest[0] < loss:
            notes.append(f"best: {bounded(lowest[0])} at step {lowest[1]:,}")
        facts.append(Fact(f"{name[:1].upper()}{name[1:]} loss", bounded(loss), "; ".join(notes)))
    return facts


def fixed(value: float | None, digits: int) -> str | None:
    """With so many digits behind the point."""
    return None if value is None else f"{value:,.{digits}f}"
