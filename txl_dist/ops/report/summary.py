"""A run at a glance: its records, settings and newest checkpoint, and what became of it. Needs neither torch nor a GPU.

`read_run` takes a run directory in any state: in progress, crashed, copied from elsewhere, of an older version. What
cannot be read is left out, and said; only a run without records is an error.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from txl_dist.config import Config, flat
from txl_dist.errors import DataError
from txl_dist.files import parse_object, parse_toml, read_bytes, read_json
from txl_dist.ops.report.records import MOST, FloatArray, History, Table, read_history
from txl_dist.processes import process_of
from txl_dist.run_files import DONE, LOCK, SETTINGS, STATE, list_checkpoints
from txl_dist.tables import aligned, compact, duration, printable
from txl_dist.text.tokenizer import load_tokenizer

_LOCK_IS_OLD_AFTER_S = 60.0
"""A job on another machine touches its lock every few seconds."""
_TIMES = {1: "never", 2: "once"}
_RECENT = 100
"""Records that a present speed is the median of."""


class Fact(NamedTuple):
    """A line of the summary."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Run:
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
    def token(self) -> str:
        """What a token is: token or word."""
        return "word" if self.start.get("token") == "word" else "token"

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


def read_run(path: Path) -> Run:
    """Raises DataError if there are no records."""
    history = read_history(path)
    settings, problem = read_settings(path)
    run = Run(path, history, settings, problem, _newest_state(path), _state_of(path, history))
    return run if "no_bits" in run.start or _has_true_bits(run) else replace(run, history=history.without(BITS))


def _has_true_bits(run: Run) -> bool:
    """Whether the bits per byte that an older program recorded, which looked at nothing, are a cost of the text."""
    settings = run.settings
    if not settings or settings.get("data.document_border") == "mask" or settings.get("eval.max_tokens"):
        return False
    for folder in reversed(list_checkpoints(run.path)):
        with suppress(DataError, OSError):
            return load_tokenizer(folder / "tokenizer.json").is_lossless
    return False


def read_settings(folder: Path) -> tuple[dict[str, Any], str]:
    """(config.toml of a run or checkpoint by `section.key`, why it cannot be read): of any version, so not checked."""
    path = folder / SETTINGS
    try:
        sections = parse_toml(read_bytes(path))
    except (OSError, ValueError) as error:
        return {}, f"{path.name} cannot be read ({getattr(error, 'strerror', None) or error})."
    parts = {section: values if isinstance(values, dict) else {"": values} for section, values in sections.items()}
    return {f"{section}.{key}": value for section, values in parts.items() for key, value in values.items()}, ""


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


def perplexity(loss: float) -> str:
    """Of a loss in nats per token."""
    return f"perplexity {compact(math.exp(min(loss, 700.0)))}"


def recent(table: Table, name: str) -> float | None:
    """The median of a column's newest numbers."""
    values = table[name][np.isfinite(table[name])][-_RECENT:]
    return float(np.median(values)) if len(values) else None


def best(table: Table, column: str = "loss") -> tuple[float, int] | None:
    """(lowest value of a column, its step); None if there is none."""
    if not table.has(column):
        return None
    index = int(np.nanargmin(table[column]))
    return float(table[column][index]), int(table["step"][index])


def lead(run: Run) -> str:
    """The run in a sentence."""
    held_out = run.history.evals.get("eval")
    loss = held_out.last("loss") if held_out is not None else None
    last = "" if loss is None else f" Last held-out loss {loss:.4f} nats per token, {perplexity(loss)}."
    return f"{run.state[:1].upper()}{run.state[1:]}.{last}"


def facts_of(run: Run) -> list[Fact]:
    """The headline: what is trained on what, how far it is, how well, how fast, where. What is not recorded is left
    out."""
    facts = [*_subject(run), *_progress(run), *_losses(run), *_speed(run), *_circumstances(run)]
    return [Fact("State", run.state), *(fact for fact in facts if fact.value)]


def fact_lines(facts: Sequence[Fact]) -> list[str]:
    """For a terminal."""
    return aligned([["", ""], *([fact.name, printable(f"{fact.value}  {fact.note}")] for fact in facts)])[1:]


def _subject(run: Run) -> list[Fact]:
    """What is trained on what, by which program; values may be anything, as nothing of a run is checked here."""
    known = run.settings | run.checkpoint | run.start
    paths = [known.get("data.path", ""), *_list_of(known.get("data.more_paths"))]
    corpora = _list_of(run.start.get("corpora")) or [Path(str(path)).name for path in paths]
    shape = {"num_layers": "{} layers", "width": "width {}", "num_heads": "{} heads", "positions": "{} positions"}
    shape |= {"cutoffs": "cutoffs {}"}
    notes = [_joined({f"model.{name}": form for name, form in shape.items()}, known)]
    notes = [f"{run.parameters:,}", *notes] if run.parameters else notes
    versions = {"torch": "torch {}", "deepspeed": "DeepSpeed {}", "zero_stage": "ZeRO-{}", "precision": "{}"}
    tools = _joined(versions, known)
    version, commit = known.get("txl_dist", known.get("code_version")), known.get("commit")
    by = f"txl_dist {version}" if version else ""
    return [
        Fact("Corpus", _listed(corpora), _listed(paths)),
        Fact("Tokenizer", _joined({"vocab_size": "{} ids"}, known), _joined({"tokenizer": "{}"}, known)),
        Fact("Model", f"{compact(run.parameters)} parameters" if run.parameters else "", _listed(notes)),
        Fact(
            "Memory",
            _joined({"train.memory_len": "{} tokens"}, known),
            _joined({"train.segment_len": "behind segments of {}", "train.num_lanes": "{} lanes"}, known),
        ),
        Fact("Commit", str(commit), _listed([by, tools])) if commit else Fact("Made by", by, tools),
        Fact("Command", shlex.join(map(str, _list_of(known.get("command"))))),
    ]


def _list_of(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values if value)


def _progress(run: Run) -> list[Fact]:
    history, total, step = run.history, run.max_steps, run.history.step
    tokens = float(run.tokens_at(np.array([float(step)]))[0])
    left_s = max((total or 0) - step, 0) * (recent(history.train, "step_ms") or 0.0) / 1000
    return [
        Fact("Step", f"{step:,}", f"of {total:,} ({100 * min(step / total, 1):.0f} %)" if total else ""),
        Fact("Tokens seen", compact(tokens) if math.isfinite(tokens) else "", f"{tokens:,.0f}"),
        Fact("Working time", duration(3600 * history.hours) if history.hours else "", "without pauses between starts"),
        Fact("Time left", duration(left_s) if left_s and run.state == "going on" else "", "at the present speed"),
    ]


def _losses(run: Run) -> list[Fact]:
    history, facts = run.history, []
    for kind, table in {"train": history.train, **history.evals}.items():
        name = "training" if kind == "train" else corpus_name(kind)
        loss, lowest = table.last("loss"), best(table)
        if loss is None or lowest is None:
            continue
        notes = ["nats per token", perplexity(loss) + (" per word" if run.token == "word" else "")]
        notes += [f"{value:.4f} {unit}" for key, unit in BITS.items() if (value := table.last(key)) is not None]
        notes += [f"{unknown:.2f} % of the tokens unknown"] if (unknown := table.last("unknown_pct")) else []
        notes += [f"no bits per byte: {reason}"] if (reason := run.no_bits.get(kind)) else []
        if table is not history.train and lowest[0] < loss:
            notes.append(f"best: {lowest[0]:.4f} at step {lowest[1]:,}")
        facts.append(Fact(f"{name[:1].upper()}{name[1:]} loss", f"{loss:.4f}", "; ".join(notes)))
    return facts


BITS = {"bits_per_byte": "bits per byte", "bits_per_character": "bits per character"}


def _speed(run: Run) -> list[Fact]:
    train = run.history.train
    median, peak = f"median of the last {min(len(train), _RECENT)} records", train.last("peak_gib")
    rows = (
        ("tokens_per_s", "Speed", "{:,.0f} tokens/s", median),
        ("mfu_pct", "MFU", "{:.1f} %", "of the devices' peak"),
        ("step_ms", "Time per step", "{:,.1f} ms", median),
        ("data_wait_pct", "Waiting for data", "{:.1f} %", "of the time of the slowest rank"),
    )
    known = [(row, value) for row in rows if (value := recent(train, row[0])) is not None]
    return [
        *(Fact(name, form.format(value), note) for (_, name, form, note), value in known),
        Fact("Peak memory", "" if peak is None else f"{peak:.2f} GiB", "of the fullest rank"),
    ]


def _circumstances(run: Run) -> list[Fact]:
    history, last = run.history, ""
    with suppress(ValueError, OverflowError, OSError):
        last = f"{datetime.fromtimestamp(history.last_time_s, UTC):%Y-%m-%d %H:%M} UTC"
    words = {"hosts": "hosts: {}", "device": "{}", "threads_per_rank": "threads per rank: {}"}
    num_starts = sum(event.name == "start" for event in history.events)
    times = _TIMES.get(num_starts, f"{num_starts - 1} times") if num_starts else ""
    return [
        Fact("Ranks", _joined({"ranks": "{}"}, run.start), _joined(words, run.start)),
        Fact("Resumed", times, _troubles(history)),
        Fact("Last record", last),
    ]


def _joined(forms: dict[str, str], values: dict[str, Any]) -> str:
    shown = {key: f"{value:,}" if type(value) is int else value for key, value in values.items() if key in forms}
    return ", ".join(form.format(shown[key]) for key, form in forms.items() if key in shown)


def _troubles(history: History) -> str:
    names = [event.name for event in history.events]
    counts = {
        "rewound": names.count("rewound"),
        "spikes": names.count("spike"),
        "skipped steps": names.count("skipped"),
        "failed saves": names.count("save_failed"),
        "records superseded by later ones": history.num_superseded,
        "torn lines in metrics.jsonl": history.num_damaged,
    }
    return ", ".join(f"{name} {number:,}" for name, number in counts.items() if number)
