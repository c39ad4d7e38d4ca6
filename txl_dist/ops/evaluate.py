"""`txl evaluate`: a trained model on held-out text, with and without its memory, beside counting baselines."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from txl_dist.config import Config, changed, check_config, config_from_dict
from txl_dist.data.check.baselines import order0_and_bigram
from txl_dist.data.read.corpus import Corpus, open_corpus
from txl_dist.data.read.evaluation import EvalStream
from txl_dist.data.read.units import TextUnits, text_units
from txl_dist.dist import gather_objects, joined_ranks, this_rank
from txl_dist.errors import CheckpointError, ConfigError, DataError, explained, of_all
from txl_dist.files import write_output
from txl_dist.infer.bundle import Bundle, load_bundle
from txl_dist.log import start_logging, warn_for_all
from txl_dist.model.memory import Memory, attended
from txl_dist.model.transformer_xl import Batch, SegmentLoss, TransformerXL
from txl_dist.ops.evaluation_settings import Overrides
from txl_dist.ops.export import read_trained
from txl_dist.progress import Progress
from txl_dist.run_files import Kind, kind_of
from txl_dist.tables import aligned
from txl_dist.train.batch import batch_maker
from txl_dist.train.checkpoint.read import require_corpus
from txl_dist.train.report.evaluate import evaluate

Result = dict[str, Any]


def evaluate_trained(
    target: Path, *, data: str | Path, overrides: Overrides, baselines: bool, json_path: Path | None
) -> list[str]:
    """Score a run, a checkpoint or a bundle; several ranks share the lanes. Returns lines for people.

    `data` is the corpus; empty takes that of the run.

    Raises ConfigError if the overrides contradict each other or the model, or there is no memory for them;
    CheckpointError or DataError if the target or the corpus cannot be read or do not belong together.
    """
    start_logging(rank=this_rank())
    overrides.check(target, is_bundle=kind_of(target) is Kind.BUNDLE, data=data)
    if json_path is not None:
        _check_writable(json_path)
    bundle, config, where = _open_target(target, data=data)
    configs = [_with_overrides(config, overrides, memory_len=one, target=target) for one in overrides.memory_len]
    config = configs[0]
    if config.model != bundle.section:  # built anew, as layers may have taken the old settings in
        bundle = dataclasses.replace(bundle, section=config.model).open(bundle.dtype, where=where)
    corpus = open_corpus(config.data.path, config.data)
    if corpus.tokenizer_sha256 != bundle.tokenizer.fingerprint:
        raise DataError(
            f"{config.data.path} was prepared with another tokenizer than {target} was trained with. "
            f"Prepare the text with --tokenizer-file and the tokenizer.json of {target}."
        )
    if config.data.eval_split not in corpus.split_names:
        known = ", ".join(corpus.split_names)
        raise DataError(
            f"{config.data.path} has no split {config.data.eval_split!r} to score; it has {known}. "
            "Name one with --split; or, with --data, a corpus that has it, prepared with --tokenizer-file and the "
            f"tokenizer.json of {target}."
        )
    units = text_units([corpus.split(config.data.eval_split)], mask_documents=config.data.document_border == "mask")
    results = _score_model(bundle.model, corpus, configs, overrides, where=where)
    if this_rank() > 0:
        return []  # rank 0 speaks
    if baselines:
        results |= _score_baselines(corpus, config, units)
    if units.problem:
        results = {name: {**values, "no_bits": units.problem} for name, values in results.items()}
    if json_path is not None:
        write_output(json_path, json.dumps(results, indent=1).encode() + b"\n")
    return [f"scored: {where}, as {config.eval.num_lanes} lanes", *_table(results, units)]


def _check_writable(path: Path) -> None:
    """Before an hour of scoring, not after it; a file that is not there yet is not left behind."""
    is_new = not path.exists()
    with explained(ConfigError, f"cannot write {path}", "Name another file with --json."):
        path.open("ab").close()
        if is_new:
            path.unlink()


def _with_overrides(config: Config, overrides: Overrides, *, memory_len: int, target: Path) -> Config:
    """The settings of the evaluation. Raises ConfigError if they contradict each other."""
    values = config.model_dump(mode="json")
    memory_len = config.train.memory_len if memory_len < 0 else memory_len
    values["data"]["eval_split"] = overrides.split or config.data.eval_split
    values["eval"] |= {
        "memory_len": memory_len,
        "segment_len": overrides.segment_len or config.eval.segment_len,
        "num_lanes": overrides.num_lanes or config.eval.num_lanes,
        "overlap_len": overrides.overlap_len or (0 if memory_len else config.eval.overlap_len),
        "max_tokens": 0,  # the whole split, as the baselines score it
    }
    values["train"]["memory_len"] = memory_len  # so that the rules are held against this evaluation
    if overrides.clamp_len >= 0:
        values["model"]["clamp_len"] = overrides.clamp_len
    if overrides.same_length != "trained":
        values["model"]["same_length"] = overrides.same_length
    changed = config_from_dict(values, source=f"evaluation of {target}")
    is_off = memory_len == 0
    if changed.model.same_length != "off" and (is_off or overrides.without_memory):
        raise ConfigError(
            f"same_length={changed.model.same_length!r} counts its window in memory, which is off here. "
            "Give --same-length off, or leave out --memory-len 0 and --without-memory."
        )
    if overrides.zero_memory and is_off:
        raise ConfigError("--zero-memory has no meaning without memory. Leave it out, or give a --memory-len above 0.")
    if overrides.zero_memory and changed.data.document_border == "mask":
        raise ConfigError(
            "--zero-memory is no document, and this model's queries see their own document only "
            "(data.document_border='mask'). Leave it out."
        )
    check_config(changed)
    return changed


def _open_target(target: Path, *, data: str | Path) -> tuple[Bundle, Config, str]:
    """(model, settings, what it is) of a bundle, a run or a checkpoint."""
    if kind_of(target) is Kind.BUNDLE:
        bundle, where = load_bundle(target), str(target)
        values = {
            "data": {"path": str(data), "document_border": bundle.document_border},
            "model": bundle.section.model_dump(),
            "train": {"segment_len": bundle.segment_len, "memory_len": bundle.memory_len},
        }
        config = config_from_dict(values, source=where)
        where += _origin(bundle.source)
    else:
        trained = read_trained(target)
        where = str(trained.folder)
        bundle = trained.package.open(where=where)
        config = changed(trained.config, {"data.path": str(data) or require_corpus(trained.folder, trained.config)})
    if bundle.document_border == "mask" and not bundle.begins_documents:
        warn_for_all(
            "this model was trained by an older program, which scored no first token of a document: here they are "
            "scored, and it never learnt to predict them"
        )
    return bundle, config, where


def _origin(source: dict[str, Any]) -> str:
    return f", step {source['step']}" if "step" in source else f", imported from {source.get('file', 'elsewhere')}"


def _score_model(
    model: TransformerXL, corpus: Corpus, configs: Sequence[Config], overrides: Overrides, *, where: str
) -> dict[str, Result]:
    """A result per configuration, which differ in their memories, and one with memory off if that is asked for."""
    results: dict[str, Result] = {}
    first = configs[0]
    split = corpus.split(first.data.eval_split)
    stream = EvalStream(
        split, num_lanes=first.eval.num_lanes, segment_len=first.eval.segment_len or first.train.segment_len
    )
    _tell_cuts(stream, overrides)
    rows = {
        "model" if len(configs) == 1 else f"memory {memory_len}": (config, memory_len)
        for config in configs
        for memory_len in [_fitting(config.eval.memory_len, stream, overrides)]
    }
    if overrides.without_memory:
        rows["memory off"] = first, 0
    pass_tokens = stream.num_lanes * stream.segment_len
    with (
        joined_ranks(timeout_s=first.engine.timeout_s, num_threads=first.engine.num_threads) as ranks,
        Progress("scoring", total=len(rows) * len(stream) * pass_tokens, every_s=math.inf, unit="tokens") as progress,
        _enough_memory(),
    ):

        def advance() -> None:
            if ranks.is_first:
                progress.advance(pass_tokens)

        if len(chosen := set(gather_objects(where))) > 1:  # of a run that saved between two looks
            raise of_all(
                CheckpointError(f"the ranks have read different models: {', '.join(sorted(chosen))}. Name one of them.")
            )
        module = SegmentLoss(model).to(ranks.device).eval()

        @torch.no_grad()
        def losses(batch: Batch, memory: Memory) -> tuple[Tensor, Memory]:
            nll_BT, memory = module(batch, memory)
            return nll_BT, memory

        def first_memory(*, num_lanes: int, memory_len: int) -> Memory:
            empty = model.empty_memory(num_lanes=num_lanes, memory_len=memory_len)
            return attended(empty) if overrides.zero_memory else empty

        maker = batch_maker(model, mask_documents=first.data.document_border == "mask")
        for name, (config, memory_len) in rows.items():
            result = evaluate(
                losses,
                first_memory,
                split,
                maker=maker,
                config=config,
                ranks=ranks,
                memory_len=memory_len,
                before_segment=advance,
            )
            results[name] = result.numbers() | {"memory_len": float(memory_len)}
    return results


@contextmanager
def _enough_memory() -> Iterator[None]:
    """Raises ConfigError where memory could not be allocated."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # of which torch has a class for devices, and none for hosts
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise ConfigError(
            f"not enough memory for this evaluation: {' '.join(str(error).split()):.200}. Give fewer lanes "
            "(--num-lanes), shorter segments (--segment-len) or less memory (--memory-len)."
        ) from error


def _tell_cuts(stream: EvalStream, overrides: Overrides) -> None:
    """Say which flags ask for more lanes or longer segments than the split has: the same scores, for less work."""
    if overrides.num_lanes > stream.num_lanes:
        warn_for_all(
            "split %r has %s tokens to score: --num-lanes %s is cut to that",
            *(stream.split.name, f"{stream.num_targets:,}", f"{overrides.num_lanes:,}"),
        )
    if overrides.segment_len > stream.segment_len:
        warn_for_all(
            "a lane of split %r has %s tokens: --segment-len %s is cut to that",
            *(stream.split.name, f"{stream.stripe_len:,}", f"{overrides.segment_len:,}"),
        )


def _fitting(memory_len: int, stream: EvalStream, overrides: Overrides) -> int:
    """The memory, no longer than what a lane of the split can put into it: the same scores, for less work."""
    lane_len = stream.stripe_len
    if memory_len <= lane_len or overrides.zero_memory:  # zeros are attended, as many as there are
        return memory_len
    longer = " --num-lanes 1 makes it longer." if stream.num_lanes > 1 else ""
    warn_for_all(
        "a lane of split %r has %s tokens, and a memory of %s never holds more: it is cut to that.%s",
        *(stream.split.name, f"{lane_len:,}", f"{memory_len:,}", longer),
    )
    return lane_len


def _score_baselines(corpus: Corpus, config: Config, units: TextUnits) -> dict[str, Result]:
    train, held_out = corpus.split(config.data.train_split), corpus.split(config.data.eval_split)
    scores = order0_and_bigram(train.read_all(), held_out.read_all(), vocab_size=corpus.vocab_size)
    return {
        name: {"loss": loss, "tokens": float(scores.num_targets), **units.told(loss)}
        for name, loss in (("order 0", scores.order0), (f"bigram (k = {scores.best_k:g})", scores.bigram))
    }


def _table(results: dict[str, Result], units: TextUnits) -> list[str]:
    """A row per score: in bits of the text where that is what it costs, else in perplexity, and why."""
    columns, digits = {"bits_per_byte": "bits/byte", "bits_per_character": "bits/char"}, 4
    if units.problem:
        columns, digits = {"ppl": f"ppl/{units.token}"}, 2
    rows = [["", *columns.values(), "nats/token", "tokens"]]
    for name, values in results.items():
        told = [f"{values[key]:.{digits}f}" for key in columns]
        rows.append([name, *told, f"{values['loss']:.4f}", f"{int(values['tokens']):,}"])
    lines = aligned(rows)
    if units.problem:
        lines.append(f"no bits per byte: {units.problem}")
    if units.unknown_pct:
        lines.append(f"unknown: {units.unknown_pct:.2f} % of the tokens")
    if len({values["tokens"] for values in results.values()}) > 1:
        lines.append("these rows are over different numbers of tokens: they do not compare")
    return lines
