"""Facts that a run recorded about one checkpoint, for the model card: text, tokens, commit, date, scores, a sample.

Scores and the sample are those of the checkpoint's own step; those of other steps belong to other weights and are left
out. A run's records may be missing, torn or of another version: what cannot be read is "not stated".
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
from txl_dist.inference.card import Card, Sample, Score
from txl_dist.io.files import open_regular, parse_object
from txl_dist.train.checkpoint.validate import SavedState

Record = dict[str, Any]


def card_of_checkpoint(folder: Path, saved: SavedState, config: Config, *, use_ema: bool) -> Card:
    """The facts of a checkpoint; `use_ema` says whether its card is about the averages of the weights."""
    state = saved.values
    start, records = _records_at(folder.parent.parent, step=saved.step)
    names = start.get("corpora") or [Path(path).name for path in state.get("corpora", ())]
    is_scored = config.eval.use_ema == use_ema
    token = str(start.get("token") or "token")
    if is_scored:
        scores = [_score(record, config, corpora=names, token=token) for record in records.values()]
    else:
        scores = []
    saved_s = records.get("event saved", {}).get("time_s")
    return Card(
        corpora=tuple(str(name) for name in names),
        tokens_seen=state["tokens_seen"],
        epochs=_number(records.get("train", {}).get("epoch")),
        began_with=Path(config.run.init).name or "fresh",
        commit=str(start.get("commit") or ""),
        version=str(state["code_version"]),
        date=_day(saved_s),
        scores=tuple(score for score in scores if score is not None),
        sample=None if use_ema else _sample(records.get("sample", {}), step=saved.step),
    )


def _records_at(run: Path, *, step: int) -> tuple[Record, dict[str, Record]]:
    """(record of the start that made a step, records of that step by kind, an event's with its name). The last record
    of a kind counts: a run that continues from an older checkpoint makes steps again."""
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
    """Starts and the records of a step. A line that a crash tore is passed over."""
    at_step = f'"step": {step}'.encode()
    for line in lines:
        if at_step not in line and b'"start"' not in line:  # a million lines are not parsed
            continue
        with suppress(ValueError):
            record = parse_object(line)
            if type(record.get("step")) is int:
                yield record


def _score(record: Record, config: Config, *, corpora: list[Any], token: str) -> Score | None:
    """Return the score in the record of an evaluation; None for another record, and for numbers that are not finite."""
    kind = str(record.get("kind"))
    if kind != "eval" and not kind.startswith("eval_"):
        return None
    if corpora:
        first = str(corpora[0])
    else:
        first = "validation"
    memory_len = config.eval.memory_len
    values = {
        "corpus": first if kind == "eval" else kind.removeprefix("eval_"),
        "split": config.data.eval_split,
        "token": token,
        **{key: record.get(key) for key in ("loss", "ppl", "tokens", "bits_per_byte")},
        "segment_len": config.eval.segment_len or config.train.segment_len,
        "memory_len": config.train.memory_len if memory_len < 0 else memory_len,
        "num_lanes": config.eval.num_lanes,
        "overlap_len": config.eval.overlap_len,
        "precision": config.engine.dtype,
    }
    with suppress(ValidationError, ValueError):
        return Score.model_validate_json(json.dumps(values, allow_nan=False))
    return None


def _sample(record: Record, *, step: int) -> Sample | None:
    prompt = record.get("prompt")
    text = record.get("text")
    if not isinstance(prompt, str) or not isinstance(text, str):
        return None
    return Sample(prompt=prompt, text=text, how=f"drawn in training at step {step:,}, temperature 1")


def _number(value: object) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    return None


def _day(time_s: object) -> str:
    """Empty for what is not a time."""
    seconds = _number(time_s)
    if seconds is None:
        return ""
    with suppress(ValueError, OverflowError, OSError):
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d}"
    return ""
