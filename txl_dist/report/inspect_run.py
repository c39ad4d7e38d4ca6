"""`txl inspect`: what a run and its checkpoints hold, and what its lanes read at a step; a corpus answers itself.

From configuration and checkpoints alone: no ranks, no GPU, no DeepSpeed; a checkpoint may have been copied elsewhere.
Facts are JSON values, for programs; lines are for people. What is damaged is shown as damaged, next to the rest.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from txl_dist.artifacts import CHECKPOINTS, DONE, SETTINGS, ArtifactKind, list_checkpoints, step_of
from txl_dist.config.load import load_config
from txl_dist.config.phases import at_step, each_phase
from txl_dist.config.schema import DataSection, RunSection, TrainSection
from txl_dist.console.formatting import bounded, counted, format_bytes, format_table
from txl_dist.data.loader.corpora import open_all, open_corpora
from txl_dist.data.loader.corpus import Corpus, Split, open_corpus
from txl_dist.data.loader.lanes import epochs_read
from txl_dist.data.loader.stream_state import StreamState, first_state
from txl_dist.data.verify import inspect as of_corpus
from txl_dist.errors import CheckpointError, TxlError
from txl_dist.report.inspect_options import InspectOptions
from txl_dist.rng import derive_seed
from txl_dist.train.checkpoint.fragments import FragmentFiles, reading
from txl_dist.train.checkpoint.read import continued_stream, with_corpora_found
from txl_dist.train.checkpoint.validate import checkpoint_problems, lane_files, lanes_of, memory_form, read_state
from txl_dist.train.run_dir import evaluated_losses
from txl_dist.vocabulary_clusters import best_cutoffs

_BESIDE = {
    "tmp": "a save that was not finished, or a removal; the next start removes it",
    "damaged": "was damaged and is kept for people; nothing reads it",
    "rewound": "set aside by a rewind; nothing reads it",
}


Answer = tuple[dict[str, Any], list[str]]
"""(facts for programs, lines for people)."""


def answer(path: str, kind: ArtifactKind, question: InspectOptions) -> Answer:
    """Answer a checked question about a corpus, a run or a checkpoint. Raises TxlError."""
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
    return open_corpus(path, DataSection(cache_dir=question.cache_dir, allow_protocols=question.allow_protocols))


def _stream_of_corpus(path: str, question: InspectOptions) -> tuple[tuple[Split, ...], StreamState, int]:
    """Return the stream that a run with the default settings and the given options would read."""
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
        lines.append("These cost least work per token; wider clusters, as in the papers' recipes, cost less loss.")
    return facts, lines


def stream_before_step(run_dir: Path, step: int) -> tuple[tuple[Split, ...], StreamState, int]:
    """(splits, where the stream was when a step began, tokens per lane and step). Step 1 is the first.

    The lanes of a run may have been cut again, and its segments may have another length. The newest checkpoint before
    the step knows where they were; the settings are those of the checkpoint after it, else of the run.
    Raises TxlError if the corpora of the run are not there.
    """
    checkpoints = list_checkpoints(run_dir)
    before = [folder for folder in checkpoints if step_of(folder) < step]
    behind = [folder for folder in checkpoints if step_of(folder) >= step]
    config = at_step(load_config((behind[0] if behind else run_dir) / SETTINGS), step - 1)
    if checkpoints:
        config = with_corpora_found(config, behind[0] if behind else checkpoints[-1])
    corpora = open_corpora(config.data, num_lanes=config.train.num_lanes, seed=config.run.seed)
    splits = corpora.train
    state = corpora.begin
    start = 0
    if before:
        last = read_state(before[-1])
        state = continued_stream(last, state, splits)[0]
        start = last.step
    segment_len = config.train.segment_len
    if behind:
        saved = read_state(behind[0]).stream
        state = state.with_skip(saved, saved)  # the run may have come back to `before` and left out what went wrong
        reached = state.advanced((step_of(behind[0]) - start) * segment_len)
        if [(one.cut(), one.position) for one in reached.corpora] != [
            (one.cut(), one.position) for one in saved.corpora
        ]:
            is_same_cut = [one.cut() for one in reached.corpora] == [one.cut() for one in saved.corpora]
            if is_same_cut:
                changed = "train.segment_len was changed"
            else:
                changed = "the lanes were cut again"
            raise CheckpointError(
                f"what the lanes read at step {step} is not known: {changed} before {behind[0].name}, and the "
                f"checkpoint from before that is gone. Name a step after {step_of(behind[0])}."
            )
    return splits, state.advanced((step - 1 - start) * segment_len), segment_len


def run_facts(run_dir: Path) -> dict[str, Any]:
    """Return the facts of a run: its checkpoints, each read and compared with its manifest, and the other entries."""
    summaries = {folder: _summary(folder) for folder in list_checkpoints(run_dir)}
    checkpoints = [one for folder, one in summaries.items() if folder.is_dir()]  # a run may remove some meanwhile
    losses = evaluated_losses(run_dir, up_to=sys.maxsize)
    for one in checkpoints:
        one["eval_loss"] = losses.get(one["step"])
    names = {one["name"] for one in checkpoints}
    others = sorted(path.name for path in (run_dir / CHECKPOINTS).glob("step_*") if path.name not in names)
    return {
        "run": str(run_dir),
        "done": (run_dir / DONE).is_file(),
        "newest_whole": max((one["step"] for one in checkpoints if not one["problems"]), default=None),
        "best_step": min(losses, key=losses.__getitem__, default=None),
        "checkpoints": checkpoints,
        "beside": [{"name": name, "what": _what_is(name)} for name in others],
    }


def _summary(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": folder.name, "step": step_of(folder), "problems": checkpoint_problems(folder)}
    keys = ("tokens_seen", "world_size", "zero_stage", "precision")
    facts |= dict.fromkeys(keys) | {"bytes": _bytes_of(folder)}
    try:
        state = read_state(folder).values
    except CheckpointError as error:
        return facts | {"problems": facts["problems"] or [str(error)]}
    return facts | {key: state.get(key) for key in keys}


def _bytes_of(folder: Path) -> int:
    with suppress(OSError):  # a run may remove it meanwhile
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return 0


def _what_is(name: str) -> str:
    word = name.partition(".")[2].partition("-")[0]
    return _BESIDE.get(word, "none of this program's")


def run_lines(facts: dict[str, Any]) -> list[str]:
    """Describe the facts of a run in lines for people."""
    if facts["newest_whole"] is None:
        newest = "none"
    else:
        newest = f"step {facts['newest_whole']:,}"
    rows = [["checkpoint", "tokens seen", "MiB", "ranks", "ZeRO", "type", "eval loss", "state"]]
    for one in facts["checkpoints"]:
        if one["step"] == facts["best_step"]:
            best = " (best)"
        else:
            best = ""
        if one["eval_loss"] is None:
            loss = "-"
        else:
            loss = f"{bounded(one['eval_loss'])}{best}"
        size = f"{one['bytes'] / 2**20:,.1f}"
        if one["problems"]:
            state = f"damaged: {one['problems'][0]}"
        else:
            state = "whole"
        known = [_or_dash(one[key]) for key in ("tokens_seen", "world_size", "zero_stage", "precision")]
        rows.append([one["name"], known[0], size, *known[1:], loss, state])
    return [
        f"{facts['run']}: {'done' if facts['done'] else 'not done'}; newest whole checkpoint: {newest}",
        *(format_table(rows) if facts["checkpoints"] else []),
        *(f"{one['name']}: {one['what']}" for one in facts["beside"]),
    ]


def _or_dash(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def checkpoint_facts(folder: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint, and its faults by its manifest. Raises CheckpointError without
    state.json."""
    saved = read_state(folder)
    problems = checkpoint_problems(folder)
    kinds: list[str] = []
    lanes: list[dict[str, Any]] = []
    try:
        kinds = FragmentFiles(folder / "engine").kinds
        lanes = [_lane_file(path) for path in lane_files(folder) if lanes_of(path)]
    except CheckpointError as error:
        problems.append(str(error))
    own = ("format_version", "code_version", "step", "tokens_seen", "world_size", "zero_stage", "precision")
    return {
        "checkpoint": str(folder),
        "problems": problems,
        "bytes": _bytes_of(folder),
        **{key: saved.values[key] for key in (*own, "loss_scale", "vocab_size", "parameters")},
        "phase": _phase_facts(folder, saved.step),
        "kinds": kinds,
        "lanes": lanes,
        "stream": _stream_facts(folder, saved.stream),
        "health": {key: getattr(saved.health, key) for key in ("skipped_steps", "num_spikes", "rewinds")},
        **{key: saved.values[key] for key in ("tokenizer_fingerprint", "config_fingerprint")},
    }


def _phase_facts(folder: Path, step: int) -> dict[str, int] | None:
    """Return the phase that the checkpoint's last step belongs to.

    None for a run without phases, or a checkpoint without settings.
    """
    with suppress(TxlError, OSError):
        phases = list(each_phase(load_config(folder / SETTINGS)))
        if len(phases) > 1:
            number = next((n for n, (steps, _) in enumerate(phases, 1) if step <= steps.stop), len(phases))
            train = phases[number - 1][1].train
            lengths = {key: getattr(train, key) for key in ("num_lanes", "segment_len", "memory_len")}
            return {"number": number, "of": len(phases), **lengths}
    return None


def _lane_file(path: Path) -> dict[str, Any]:
    with reading("the memories", path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        shapes = {name: one.get_shape() for name, one in slices.items()}
        dtypes = {name: str(one.get_dtype()) for name, one in slices.items()}
    form = memory_form(shapes)
    if form is None:
        raise CheckpointError(f"the memories in {path} have the shapes {shapes}, not [layers, lanes, tokens, width].")
    shape = {
        "num_layers": len(form.memory_lens),
        "memory_len": max(form.memory_lens),
        **({"memory_lens": list(form.memory_lens)} if len(set(form.memory_lens)) > 1 else {}),
        "width": form.width,
        "dtype": dtypes[min(dtypes.keys() - {"document"})],
    }
    lanes = lanes_of(path)
    return {"file": f"lanes/{path.name}", "first": lanes.start, "last": lanes.stop - 1, **shape}


def _stream_facts(folder: Path, stream: StreamState) -> list[dict[str, Any]]:
    """Per corpus; how often it has been read is known only where it lies on this machine."""
    tokens: dict[tuple[str, str], int] = {}
    with suppress(TxlError, OSError):
        config = with_corpora_found(load_config(folder / SETTINGS), folder)
        if all(Path(path).is_dir() for path in config.data.paths):
            splits = [corpus.split(config.data.train_split) for corpus in open_all(config.data)]
            tokens = {(split.corpus.fingerprint, split.name): split.tokens for split in splits}
    found = []
    for one in stream.corpora:
        num_tokens = tokens.get((one.fingerprint, one.split))
        found.append(
            {
                **{key: getattr(one, key) for key in ("name", "split", "fingerprint", "num_lanes", "position")},
                "cut_in_epoch": one.epoch,
                "epochs_read": num_tokens and epochs_read(one.cut(), one.position, num_tokens=num_tokens),
                "skips": [list(skip) for skip in one.skips],
            }
        )
    return found


def checkpoint_lines(facts: dict[str, Any], *, max_parameters: int) -> list[str]:
    """Describe the facts of a checkpoint in lines for people."""
    counts = {name: math.prod(shape) for name, shape in facts["parameters"].items()}
    rows = [["parameter", "values", "shape"]]
    rows += [[name, f"{counts[name]:,}", f"{shape}"] for name, shape in facts["parameters"].items()]
    hidden = len(counts) - max_parameters
    health = facts["health"]
    return [
        f"{facts['checkpoint']}: {'damaged' if facts['problems'] else 'whole'}, {format_bytes(facts['bytes'])}, "
        f"format version {facts['format_version']}, written by txl_dist {facts['code_version']}",
        *(f"  {problem}" for problem in facts["problems"]),
        f"step {facts['step']:,}, {facts['tokens_seen']:,} tokens; {counted(facts['world_size'], 'rank')}, ZeRO "
        f"{facts['zero_stage']}, {facts['precision']}"
        + (f", loss scale {facts['loss_scale']['cur_scale']:g}" if facts["loss_scale"] else ""),
        *_phase_lines(facts["phase"]),
        f"skipped steps: {health['skipped_steps']}; spikes: {health['num_spikes']}; rewinds: {health['rewinds']}",
        f"tokenizer {facts['tokenizer_fingerprint'][:16]}, {facts['vocab_size']:,} ids; settings "
        f"{facts['config_fingerprint'][:16]}",
        "",
        *_stream_lines(facts["stream"]),
        "",
        *(
            f"{one['file']}: memories of lanes {one['first']} to {one['last']}, "
            f"{counted(one['num_layers'], 'layer')} x "
            f"{' '.join(map(str, one.get('memory_lens', [one['memory_len']])))} tokens x {one['width']}, {one['dtype']}"
            for one in facts["lanes"]
        ),
        f"{sum(counts.values()):,} values in {len(counts)} parameters, each with {', '.join(facts['kinds'])}",
        *format_table(rows[: max_parameters + 1]),
        *([f"... and {hidden:,} more"] if hidden > 0 else []),
    ]


def _phase_lines(phase: dict[str, int] | None) -> list[str]:
    if phase is None:
        return []
    lengths = f"{counted(phase['num_lanes'], 'lane')} x {counted(phase['segment_len'], 'token')}"
    return [f"phase {phase['number']} of {phase['of']}: {lengths}, a memory of {phase['memory_len']}"]


def _stream_lines(corpora: Sequence[dict[str, Any]]) -> list[str]:
    rows = [["corpus", "split", "fingerprint", "lanes", "position", "cut in epoch", "epochs read", "left out per lane"]]
    for one in corpora:
        if one["epochs_read"] is None:
            epochs = "?"
        else:
            epochs = f"{one['epochs_read']:.3f}"
        numbers = [f"{one[key]:,}" for key in ("num_lanes", "position", "cut_in_epoch")]
        skipped = sum(end - first for first, end in one["skips"])
        rows.append([one["name"], one["split"], one["fingerprint"][:16], *numbers, epochs, f"{skipped:,}"])
    return format_table(rows)
