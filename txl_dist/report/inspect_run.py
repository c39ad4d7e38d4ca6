"""`txl inspect`: the contents of a run and its checkpoints, and the text that its lanes read at a step.

The command reads only configuration and checkpoints, so it needs no other ranks, no GPU and no DeepSpeed. A checkpoint
may have been copied elsewhere. Each answer has facts for programs as JSON values, and lines for people. A damaged file
is reported as damaged, and all other files are still shown. Questions about a corpus alone are answered by the data
package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from txl_dist.artifacts import (
    CHECKPOINTS,
    DONE,
    FROM_MIRROR,
    SETTINGS,
    ArtifactKind,
    is_url,
    list_checkpoints,
    step_of,
)
from txl_dist.config.load import load_config
from txl_dist.config.phases import at_step, each_phase
from txl_dist.config.schema import DataSection, RunSection, TrainSection
from txl_dist.console.formatting import bounded, counted, format_bytes, format_table
from txl_dist.data.loader.corpora import open_all, open_corpora
from txl_dist.data.loader.corpus import Corpus, open_corpus, storage_of
from txl_dist.data.loader.lanes import epochs_read
from txl_dist.data.loader.shards import Split
from txl_dist.data.loader.stream_state import StreamState, first_state
from txl_dist.data.verify import inspect as of_corpus
from txl_dist.errors import CheckpointError, ConfigError, DataError, TxlError, UnreachableError
from txl_dist.report.inspect_options import InspectOptions
from txl_dist.report.records import History, history_of, read_history
from txl_dist.report.recoveries import RecoveryRecord, lost_time, recoveries_of, recovery_rows
from txl_dist.report.summary import recent
from txl_dist.rng import derive_seed
from txl_dist.train.checkpoint.fragments import FragmentFiles, reading
from txl_dist.train.checkpoint.read import continued_stream, with_corpora_found
from txl_dist.train.checkpoint.validate import checkpoint_problems, lane_files, lanes_of, memory_form, read_state
from txl_dist.vocabulary_clusters import best_cutoffs

_BESIDE = {
    "tmp": "unfinished save or removal, which the next start deletes",
    "damaged": "damaged checkpoint, which is kept for inspection and never read",
    "rewound": "set aside by a rewind, and never read",
}


Answer = tuple[dict[str, Any], list[str]]
"""Result of `txl inspect`: (facts as JSON values for programs, lines for people)."""


def answer(path: str, kind: ArtifactKind, question: InspectOptions) -> Answer:
    """Return the facts about a corpus, a run or a checkpoint at a path, and lines for people.

    `kind` says whether the path is a corpus, a run or a checkpoint. `question` holds the command-line options, which
    `check` has accepted. Raises TxlError if the path cannot be read, or lacks what the options select.
    """
    if kind is ArtifactKind.CHECKPOINT:
        facts = checkpoint_facts(Path(path))
        return facts, checkpoint_lines(facts, max_parameters=question.max_documents)
    if question.lane >= 0:
        if kind is ArtifactKind.RUN:
            where = stream_before_step(Path(path), question.step)
        else:
            where = _stream_of_corpus(path, question)
        facts = of_corpus.lane_facts(*where, lane=question.lane)
        return facts, of_corpus.lane_lines(facts)
    if kind is ArtifactKind.RUN:
        facts = run_facts(Path(path))
        return facts, run_lines(facts)
    corpus = _open(path, question)
    if question.shard:
        return _shard(question, corpus)
    return _corpus(question, corpus)


def _open(path: str, question: InspectOptions) -> Corpus:
    settings = DataSection(cache_dir=question.cache_dir, allow_protocols=question.allow_protocols)
    try:
        return open_corpus(path, settings)
    except DataError as error:
        is_unreachable = isinstance(error.__cause__, UnreachableError)
        if not is_url(path) or is_unreachable or not _has_settings(path, settings):
            raise
        raise ConfigError(
            f"{path} is a run or a checkpoint. `txl inspect` reads runs and checkpoints from local folders only. "
            f"{FROM_MIRROR}"
        ) from error


def _has_settings(url: str, settings: DataSection) -> bool:
    """Return whether a URL has the file of settings that each run and checkpoint has."""
    try:
        storage_of(url, settings).read(SETTINGS)
    except DataError:
        return False
    return True


def _stream_of_corpus(path: str, question: InspectOptions) -> tuple[tuple[Split, ...], StreamState, int]:
    """Return the token stream that a run on this corpus would read, with default settings and the given options."""
    splits = (_open(path, question).split(question.split),)
    train = TrainSection()
    seed = derive_seed(question.seed or RunSection().seed, "documents")
    start = first_state(splits, num_lanes=question.num_lanes or train.num_lanes, seed=seed)
    segment_len = question.segment_len or train.segment_len
    return splits, start.advanced((question.step - 1) * segment_len), segment_len


def _shard(question: InspectOptions, corpus: Corpus) -> Answer:
    split, index = of_corpus.find_shard(corpus, question.shard)
    if question.document < 0:
        facts = of_corpus.shard_facts(split, index, max_documents=question.max_documents)
        return facts, of_corpus.shard_lines(facts)
    facts = of_corpus.document_facts(split, index, question.document, max_tokens=question.max_tokens)
    return facts, of_corpus.document_lines(facts)


def _corpus(question: InspectOptions, corpus: Corpus) -> Answer:
    facts = of_corpus.corpus_facts(corpus)
    lines = of_corpus.corpus_lines(facts)
    cutoffs = question.cutoffs
    if question.num_clusters:
        cutoffs = best_cutoffs(
            corpus.split(question.split).counts(),
            num_clusters=question.num_clusters,
            width=question.width,
            div_value=question.div_value,
        )
    if cutoffs:
        facts["clusters"] = of_corpus.cluster_facts(corpus.split(question.split), cutoffs)
        lines += ["", *of_corpus.cluster_lines(facts["clusters"])]
    if question.num_clusters:
        lines.append(
            "These cutoffs need the least work per token. Wider clusters, as in the papers' recipes, give a lower loss."
        )
    return facts, lines


def stream_before_step(run_dir: Path, step: int) -> tuple[tuple[Split, ...], StreamState, int]:
    """Return (splits, state of the token stream before a step, tokens per lane and step). The first step is step 1.

    A run may have changed its number of lanes (batch rows) or its segment length. So the state is computed from the
    newest checkpoint before the step. The settings come from the first checkpoint at or after the step. If there is no
    such checkpoint, they come from the run. Raises TxlError if the run's corpora are missing, or if the run changed its
    lanes or lengths between the two checkpoints around the step.
    """
    checkpoints = list_checkpoints(run_dir)
    before = [folder for folder in checkpoints if step_of(folder) < step]
    behind = [folder for folder in checkpoints if step_of(folder) >= step]
    if behind:
        settings_dir = behind[0]
    else:
        settings_dir = run_dir
    config = at_step(load_config(settings_dir / SETTINGS), step - 1)
    if behind:
        config = with_corpora_found(config, behind[0])
    elif checkpoints:
        config = with_corpora_found(config, checkpoints[-1])
    corpora = open_corpora(config.data, num_lanes=config.train.num_lanes, seed=config.run.seed)
    splits = corpora.train
    state = corpora.begin
    start = 0
    if before:
        last = read_state(before[-1])
        state = continued_stream(last, state, splits)[0]
        start = last.step
    step_len = config.train.step_len
    if behind:
        saved = read_state(behind[0]).stream
        state = state.with_skip(saved, saved)  # the run may have come back to `before` and left out what went wrong
        saved_step = step_of(behind[0])
        reached = state.advanced((saved_step - start) * step_len)
        changed = _change_between(reached, saved)
        if changed:
            raise CheckpointError(
                f"the text of step {step} cannot be computed: {changed} before {behind[0].name}, and no checkpoint "
                f"exists for the step at which this happened. Give a step after {saved_step}."
            )
    return splits, state.advanced((step - 1 - start) * step_len), config.train.segment_len


def _change_between(reached: StreamState, saved: StreamState) -> str:
    """Return the reason why a stream does not reach the state that a checkpoint saved, or an empty text if the stream
    reaches it."""
    reached_cuts = [corpus.cut() for corpus in reached.corpora]
    saved_cuts = [corpus.cut() for corpus in saved.corpora]
    if reached_cuts != saved_cuts:
        return "the corpora were divided among lanes again"
    reached_positions = [corpus.position for corpus in reached.corpora]
    saved_positions = [corpus.position for corpus in saved.corpora]
    if reached_positions != saved_positions:
        return "train.segment_len was changed"
    return ""


def _losses_by_step(history: History) -> dict[int, float]:
    """Return the losses of the evaluations that decide which checkpoint is the best, in nats per token."""
    losses = {}
    for step, loss in zip(history.held_out["step"], history.held_out["loss"], strict=True):
        if math.isfinite(loss):
            losses[int(step)] = float(loss)
    return losses


def run_facts(run_dir: Path) -> dict[str, Any]:
    """Return the facts of a run: its checkpoints, and the other entries of its folder.

    Each checkpoint is read and compared with its manifest.
    """
    summaries = {folder: _summary(folder) for folder in list_checkpoints(run_dir)}
    checkpoints = [summary for folder, summary in summaries.items() if folder.is_dir()]  # a run may remove some
    try:
        history = read_history(run_dir)
    except DataError:  # the run has no records
        history = history_of([])
    losses = _losses_by_step(history)
    recoveries = recoveries_of(history.events, step_ms=recent(history.train, "step_ms"))
    names = set()
    whole_steps = []
    for checkpoint in checkpoints:
        step = checkpoint["step"]
        checkpoint["eval_loss"] = losses.get(step)
        names.add(checkpoint["name"])
        if not checkpoint["problems"]:
            whole_steps.append(step)
    others = []
    for path in (run_dir / CHECKPOINTS).glob("step_*"):
        if path.name not in names:
            others.append(path.name)
    return {
        "run": str(run_dir),
        "done": (run_dir / DONE).is_file(),
        "newest_whole": max(whole_steps, default=None),
        "best_step": min(losses, key=losses.__getitem__, default=None),
        "checkpoints": checkpoints,
        "recoveries": [recovery._asdict() for recovery in recoveries],
        "beside": [{"name": name, "what": _what_is(name)} for name in sorted(others)],
    }


_SUMMARY_KEYS = ("tokens_seen", "world_size", "zero_stage", "precision")
"""Keys of a checkpoint's state that the table of a run's checkpoints shows."""


def _summary(folder: Path) -> dict[str, Any]:
    """Return the facts of a checkpoint for the table of a run. A fact that state.json lacks is None."""
    facts: dict[str, Any] = {
        "name": folder.name,
        "step": step_of(folder),
        "problems": checkpoint_problems(folder),
    }
    for key in _SUMMARY_KEYS:
        facts[key] = None
    facts["bytes"] = _bytes_of(folder)
    try:
        state = read_state(folder).values
    except CheckpointError as error:
        if not facts["problems"]:
            facts["problems"] = [str(error)]
        return facts
    for key in _SUMMARY_KEYS:
        facts[key] = state.get(key)
    return facts


def _bytes_of(folder: Path) -> int:
    with suppress(OSError):  # a run may remove it meanwhile
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return 0


def _what_is(name: str) -> str:
    word = name.partition(".")[2].partition("-")[0]
    return _BESIDE.get(word, "not a file or folder of txl_dist")


def run_lines(facts: dict[str, Any]) -> list[str]:
    """Describe a run for people. `facts` comes from `run_facts`. Returns lines of text."""
    if facts["newest_whole"] is None:
        newest = "none"
    else:
        newest = f"step {facts['newest_whole']:,}"
    if facts["done"]:
        done = "done"
    else:
        done = "not done"
    lines = [f"{facts['run']}: {done}; newest whole checkpoint: {newest}"]
    rows = [["checkpoint", "tokens seen", "MiB", "ranks", "ZeRO", "type", "eval loss", "state"]]
    for checkpoint in facts["checkpoints"]:
        is_best = checkpoint["step"] == facts["best_step"]
        rows.append(_run_row(checkpoint, is_best=is_best))
    if facts["checkpoints"]:
        lines += format_table(rows)
    lines += _recovery_lines([RecoveryRecord(**recovery) for recovery in facts["recoveries"]])
    for other in facts["beside"]:
        lines.append(f"{other['name']}: {other['what']}")
    return lines


def _recovery_lines(recoveries: Sequence[RecoveryRecord]) -> list[str]:
    """Return lines about the ranks that were replaced inside the running job, or no lines."""
    if not recoveries:
        return []
    counts = f"{len(recoveries):,} {'recovery' if len(recoveries) == 1 else 'recoveries'}"
    return [f"{counts}, which took {lost_time(recoveries)}", *format_table(recovery_rows(recoveries))]


def _run_row(checkpoint: dict[str, Any], *, is_best: bool) -> list[str]:
    """Return a checkpoint's row in the table of a run."""
    if checkpoint["eval_loss"] is None:
        loss = "-"
    else:
        loss = bounded(checkpoint["eval_loss"])
        if is_best:
            loss += " (best)"
    if checkpoint["problems"]:
        state = f"damaged: {checkpoint['problems'][0]}"
    else:
        state = "whole"
    return [
        checkpoint["name"],
        _or_dash(checkpoint["tokens_seen"]),
        f"{checkpoint['bytes'] / 2**20:,.1f}",
        _or_dash(checkpoint["world_size"]),
        _or_dash(checkpoint["zero_stage"]),
        _or_dash(checkpoint["precision"]),
        loss,
        state,
    ]


def _or_dash(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def checkpoint_facts(folder: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint, and its differences from its manifest.

    Raises CheckpointError if state.json is missing.
    """
    saved = read_state(folder)
    problems = checkpoint_problems(folder)
    kinds: list[str] = []
    lanes: list[dict[str, Any]] = []
    try:
        kinds = FragmentFiles(folder / "engine").kinds
        lanes = [_lane_file(path) for path in lane_files(folder) if lanes_of(path)]
    except CheckpointError as error:
        problems.append(str(error))
    values = saved.values
    health = {
        "skipped_steps": saved.health.skipped_steps,
        "num_spikes": saved.health.num_spikes,
        "rewinds": saved.health.rewinds,
    }
    return {
        "checkpoint": str(folder),
        "problems": problems,
        "bytes": _bytes_of(folder),
        "format_version": values["format_version"],
        "code_version": values["code_version"],
        "step": values["step"],
        "tokens_seen": values["tokens_seen"],
        "world_size": values["world_size"],
        "zero_stage": values["zero_stage"],
        "precision": values["precision"],
        "loss_scale": values["loss_scale"],
        "vocab_size": values["vocab_size"],
        "parameters": values["parameters"],
        "phase": _phase_facts(folder, saved.step),
        "kinds": kinds,
        "lanes": lanes,
        "stream": _stream_facts(folder, saved.stream),
        "health": health,
        "tokenizer_fingerprint": values["tokenizer_fingerprint"],
        "config_fingerprint": values["config_fingerprint"],
    }


def _phase_facts(folder: Path, step: int) -> dict[str, int] | None:
    """Return facts of the training phase to which the checkpoint's last step belongs.

    Returns None for a run without phases, or a checkpoint without settings.
    """
    with suppress(TxlError, OSError):
        config = load_config(folder / SETTINGS)
        phases = list(each_phase(config))
        if len(phases) < 2:
            return None
        number = 0
        for steps, phase in phases:
            number += 1
            train = phase.train
            if step <= steps.stop:
                break
        return {
            "number": number,
            "of": len(phases),
            "num_lanes": train.num_lanes,
            "segment_len": train.segment_len,
            "memory_len": train.memory_len,
        }
    return None


def _lane_file(path: Path) -> dict[str, Any]:
    with reading("the memories", path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        shapes = {name: part.get_shape() for name, part in slices.items()}
        dtypes = {name: str(part.get_dtype()) for name, part in slices.items()}
    form = memory_form(shapes)
    if form is None:
        raise CheckpointError(
            f"the memories in {path} have the shapes {shapes}, not [layers, lanes, tokens, width]. Inspect another "
            "checkpoint."
        )
    lanes = lanes_of(path)
    facts: dict[str, Any] = {
        "file": f"lanes/{path.name}",
        "first": lanes.start,
        "last": lanes.stop - 1,
        "num_layers": len(form.memory_lens),
        "memory_len": max(form.memory_lens),
    }
    if len(set(form.memory_lens)) > 1:
        facts["memory_lens"] = list(form.memory_lens)
    facts["width"] = form.width
    memory_names = dtypes.keys() - {"document"}
    facts["dtype"] = dtypes[min(memory_names)]
    return facts


def _stream_facts(folder: Path, stream: StreamState) -> list[dict[str, Any]]:
    """Return facts of each corpus that the checkpoint's stream reads.

    The number of passes over a corpus is included only if the corpus is on this machine.
    """
    tokens_of_split = _tokens_of_splits(folder)
    facts = []
    for corpus in stream.corpora:
        key = (corpus.fingerprint, corpus.split)
        num_tokens = tokens_of_split.get(key)
        num_epochs: float | None = num_tokens
        if num_tokens:
            num_epochs = epochs_read(corpus.cut(), corpus.position, num_tokens=num_tokens)
        facts.append(
            {
                "name": corpus.name,
                "split": corpus.split,
                "fingerprint": corpus.fingerprint,
                "num_lanes": corpus.num_lanes,
                "position": corpus.position,
                "cut_in_epoch": corpus.epoch,
                "epochs_read": num_epochs,
                "skips": [list(skip) for skip in corpus.skips],
            }
        )
    return facts


def _tokens_of_splits(folder: Path) -> dict[tuple[str, str], int]:
    """Return the number of tokens of each training split by (fingerprint, name).

    The result is empty if a corpus is not on this machine.
    """
    with suppress(TxlError, OSError):
        config = load_config(folder / SETTINGS)
        config = with_corpora_found(config, folder)
        if not all(Path(path).is_dir() for path in config.data.paths):
            return {}
        splits = [corpus.split(config.data.train_split) for corpus in open_all(config.data)]
        return {(split.corpus.fingerprint, split.name): split.tokens for split in splits}
    return {}


def checkpoint_lines(facts: dict[str, Any], *, max_parameters: int) -> list[str]:
    """Describe a checkpoint for people. `facts` comes from `checkpoint_facts`. Returns lines of text.

    At most `max_parameters` parameters of the checkpoint are listed.
    """
    lines = _state_lines(facts)
    lines.append("")
    lines += _stream_lines(facts["stream"])
    lines.append("")
    for lane_file in facts["lanes"]:
        lines.append(_lane_file_line(lane_file))
    lines += _parameter_lines(facts, max_parameters=max_parameters)
    return lines


def _state_lines(facts: dict[str, Any]) -> list[str]:
    """Return lines about a checkpoint's state: damage, step, phase, skipped steps and fingerprints."""
    if facts["problems"]:
        state = "damaged"
    else:
        state = "whole"
    lines = [
        f"{facts['checkpoint']}: {state}, {format_bytes(facts['bytes'])}, "
        f"format version {facts['format_version']}, written by txl_dist {facts['code_version']}"
    ]
    for problem in facts["problems"]:
        lines.append(f"  {problem}")
    ranks = counted(facts["world_size"], "rank")
    reached = (
        f"step {facts['step']:,}, {facts['tokens_seen']:,} tokens; {ranks}, ZeRO {facts['zero_stage']}, "
        f"{facts['precision']}"
    )
    if facts["loss_scale"]:
        reached += f", loss scale {facts['loss_scale']['cur_scale']:g}"
    lines.append(reached)
    lines += _phase_lines(facts["phase"])
    health = facts["health"]
    lines.append(
        f"skipped steps: {health['skipped_steps']}; spikes: {health['num_spikes']}; rewinds: {health['rewinds']}"
    )
    tokenizer = facts["tokenizer_fingerprint"][:16]
    settings = facts["config_fingerprint"][:16]
    lines.append(f"tokenizer {tokenizer}, {facts['vocab_size']:,} ids; settings {settings}")
    return lines


def _lane_file_line(lane_file: dict[str, Any]) -> str:
    """Return a line about a file that holds the memories of lanes."""
    lanes = f"{lane_file['first']} to {lane_file['last']}"
    layers = counted(lane_file["num_layers"], "layer")
    memory_lens = lane_file.get("memory_lens", [lane_file["memory_len"]])
    lengths = " ".join(str(memory_len) for memory_len in memory_lens)
    return (
        f"{lane_file['file']}: memories of lanes {lanes}, {layers} x {lengths} tokens x {lane_file['width']}, "
        f"{lane_file['dtype']}"
    )


def _parameter_lines(facts: dict[str, Any], *, max_parameters: int) -> list[str]:
    """List the parameters of a checkpoint, at most `max_parameters` of them."""
    rows = [["parameter", "values", "shape"]]
    num_values = 0
    for name, shape in facts["parameters"].items():
        count = math.prod(shape)
        num_values += count
        rows.append([name, f"{count:,}", f"{shape}"])
    num_parameters = len(facts["parameters"])
    kinds = ", ".join(facts["kinds"])
    lines = [f"{num_values:,} values in {num_parameters} parameters, each with {kinds}"]
    lines += format_table(rows[: max_parameters + 1])
    num_hidden = num_parameters - max_parameters
    if num_hidden > 0:
        lines.append(f"... and {num_hidden:,} more")
    return lines


def _phase_lines(phase: dict[str, int] | None) -> list[str]:
    if phase is None:
        return []
    lengths = f"{counted(phase['num_lanes'], 'lane')} x {counted(phase['segment_len'], 'token')}"
    return [f"phase {phase['number']} of {phase['of']}: {lengths}, a memory of {phase['memory_len']}"]


def _stream_lines(corpora: Sequence[dict[str, Any]]) -> list[str]:
    rows = [["corpus", "split", "fingerprint", "lanes", "position", "cut in epoch", "epochs read", "left out per lane"]]
    for corpus in corpora:
        if corpus["epochs_read"] is None:
            epochs = "?"
        else:
            epochs = f"{corpus['epochs_read']:.3f}"
        num_skipped = 0
        for first, end in corpus["skips"]:
            num_skipped += end - first
        rows.append(
            [
                corpus["name"],
                corpus["split"],
                corpus["fingerprint"][:16],
                f"{corpus['num_lanes']:,}",
                f"{corpus['position']:,}",
                f"{corpus['cut_in_epoch']:,}",
                epochs,
                f"{num_skipped:,}",
            ]
        )
    return format_table(rows)
