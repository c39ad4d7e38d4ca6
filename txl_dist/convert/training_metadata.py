"""Metadata that a run recorded about one checkpoint, for the model card.

The metadata are corpora, tokens, commit, date, scores, and a sample of text. Scores and the sample must come from the
checkpoint's own step, because other steps have other weights. A run's records can be missing, damaged or of another
version. The card says "not stated" for everything that cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from txl_dist.artifacts import RECORDS, ArtifactKind, detect_artifact
from txl_dist.config.load import Config
from txl_dist.config.schema import paths_of_sets
from txl_dist.inference.card import Card, Sample, Score
from txl_dist.io.files import open_regular, parse_object
from txl_dist.train.checkpoint.validate import SavedState

Record = dict[str, Any]


def card_of_checkpoint(folder: Path, saved: SavedState, config: Config, *, use_ema: bool) -> Card:
    """Return the model card of a checkpoint, from the records of its run.

    `use_ema` says whether the card describes the moving averages of the weights.
    """
    state = saved.values
    start, records = _records_at(folder.parent.parent, step=saved.step)
    paths = state.get("corpora", ())
    names = start.get("corpora") or [Path(path).name for path in paths]
    token = str(start.get("token") or "token")
    scores: list[Score] = []
    if config.eval.use_ema == use_ema:  # else the run evaluated the other weights
        for record in records.values():
            score = _score(record, config, corpora=names, token=token)
            if score is not None:
                scores.append(score)
    sample = None
    if not use_ema:
        sample = _sample(records.get("sample", {}), step=saved.step)
    saved_s = records.get("event saved", {}).get("time_s")
    epochs = records.get("train", {}).get("epoch")
    return Card(
        corpora=tuple(str(name) for name in names),
        tokens_seen=state["tokens_seen"],
        epochs=_number(epochs),
        began_with=Path(config.run.init).name or "fresh",
        commit=str(start.get("commit") or ""),
        version=str(state["code_version"]),
        date=_day(saved_s),
        scores=tuple(scores),
        sample=sample,
    )


def _records_at(run: Path, *, step: int) -> tuple[Record, dict[str, Record]]:
    """Return the record of the process start that computed a step, and the records of that step by their kind.

    A record's kind includes the name of an event. If there are several records of a kind, the last one is returned,
    because a run that resumes an older checkpoint computes steps again.
    """
    start: Record = {}
    found: dict[str, Record] = {}
    if detect_artifact(run) is not ArtifactKind.RUN:
        return start, found
    with suppress(OSError), open_regular(run / RECORDS) as stream:
        for record in _parsed(stream, step=step):
            event = record.get("event")
            if event == "start" and (not start or record["step"] < step):
                start = record
            elif record["step"] == step:
                kind = str(record.get("kind"))
                found[kind if event is None else f"{kind} {event}"] = record
    return start, found


def _parsed(lines: Iterator[bytes], *, step: int) -> Iterator[Record]:
    """Yield the records of process starts and the records of one step. Lines that a crash cut short are skipped."""
    at_step = f'"step": {step}'.encode()
    for line in lines:
        if at_step not in line and b'"start"' not in line:  # so that a million lines need no parsing
            continue
        with suppress(ValueError):
            record = parse_object(line)
            if type(record.get("step")) is int:
                yield record


def _score(record: Record, config: Config, *, corpora: list[Any], token: str) -> Score | None:
    """Return the score in the record of an evaluation.

    Returns None for another kind of record, and for numbers that are not finite.
    """
    kind = str(record.get("kind"))
    if kind != "eval" and not kind.startswith("eval_"):
        return None
    corpus = kind.removeprefix("eval_")
    if kind == "eval":
        corpus = str(corpora[0]) if corpora else "validation"
    sets = [f"eval_{name}" for name, _ in paths_of_sets(config.eval.sets)]
    memory_len = config.eval.memory_len
    if memory_len < 0:
        memory_len = config.train.memory_len
    values = {
        "corpus": corpus,
        "split": "held-out set" if kind in sets else config.data.eval_split,
        "token": token,
        **{key: record.get(key) for key in ("loss", "ppl", "tokens", "bits_per_byte")},
        "segment_len": config.eval.segment_len or config.train.segment_len,
        "memory_len": memory_len,
        "num_lanes": config.eval.num_lanes,
        "overlap_len": config.eval.overlap_len,
        "precision": config.engine.dtype,
    }
    with suppress(ValidationError, ValueError):
        return Score.model_validate_json(json.dumps(values, allow_nan=False))
    return None


def _sample(record: Record, *, step: int) -> Sample | None:
    """Return the sample of text in a record, or None if the record has none."""
    prompt = record.get("prompt")
    text = record.get("text")
    if not isinstance(prompt, str) or not isinstance(text, str):
        return None
    return Sample(prompt=prompt, text=text, how=f"drawn in training at step {step:,}, temperature 1")


def _number(value: object) -> float | None:
    """Return a JSON value as a float, or None if it is not a number."""
    if isinstance(value, int | float):
        return float(value)
    return None


def _day(time_s: object) -> str:
    """Return the date of a time in seconds since 1970, or an empty string if the value is not a time."""
    seconds = _number(time_s)
    if seconds is None:
        return ""
    with suppress(ValueError, OverflowError, OSError):
        time = datetime.fromtimestamp(seconds, UTC)
        return f"{time:%Y-%m-%d}"
    return ""
