"""`txl evaluate`: a trained model on held-out text, with and without its memory, beside counting baselines."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from txl_dist.config import Config, config_from_dict
from txl_dist.data.baselines import order0_and_bigram
from txl_dist.data.corpus import Corpus, open_corpus
from txl_dist.dist import joined_ranks, this_rank
from txl_dist.errors import ConfigError, DataError
from txl_dist.infer.bundle import is_bundle, load, network_of
from txl_dist.log import start_logging
from txl_dist.model.memory import Memory
from txl_dist.model.transformer_xl import Batch, SegmentLoss, TransformerXL
from txl_dist.train.batch import batch_maker
from txl_dist.train.evaluate import evaluate
from txl_dist.train.export import read_trained

Result = dict[str, float]


def evaluate_trained(
    target: Path,
    *,
    data: Path | None,
    split: str,
    memory_len: int,
    segment_len: int,
    num_lanes: int,
    without_memory: bool,
    baselines: bool,
    json_path: Path | None,
) -> list[str]:
    """Score a run, a checkpoint or a bundle; several ranks share the lanes. Returns lines for people.

    Zero, -1 and "" take the run's settings. Raises CheckpointError or DataError if the target or the corpus cannot
    be read or do not belong together.
    """
    start_logging()
    if json_path is not None:
        _check_writable(json_path)
    model, tokenizer_fingerprint, config, where = _open_target(target, data=data)
    config = _with_overrides(
        config, target=target, split=split, memory_len=memory_len, segment_len=segment_len, num_lanes=num_lanes
    )
    corpus = open_corpus(config.data.path)
    if corpus.tokenizer_sha256 != tokenizer_fingerprint:
        raise DataError(
            f"{config.data.path} was prepared with another tokenizer than {target} was trained with. "
            f"Prepare the text with --tokenizer-file and the tokenizer.json of {target}."
        )
    results = _score_model(model, corpus, config, without_memory=without_memory)
    if this_rank() > 0:
        return []  # rank 0 speaks
    if baselines:
        results |= _score_baselines(corpus, config)
    if json_path is not None:
        json_path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return [f"scored: {where}", *_table(results)]


def _check_writable(path: Path) -> None:
    """Before an hour of scoring, not after it; a file that is not there yet is not left behind."""
    is_new = not path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}. Name another file with --json.") from error


def _with_overrides(
    config: Config, *, target: Path, split: str, memory_len: int, segment_len: int, num_lanes: int
) -> Config:
    values = config.model_dump(mode="json")
    values["data"]["eval_split"] = split or config.data.eval_split
    values["eval"] |= {
        "memory_len": config.train.memory_len if memory_len < 0 else memory_len,
        "segment_len": segment_len or config.eval.segment_len,
        "num_lanes": num_lanes or config.eval.num_lanes,
        "max_tokens": 0,  # the whole split, as the baselines score it
    }
    return config_from_dict(values, source=f"evaluation of {target}")


def _open_target(target: Path, *, data: Path | None) -> tuple[TransformerXL, str, Config, str]:
    """(model, fingerprint of its tokenizer, settings, what it is) of a bundle, a run or a checkpoint."""
    if is_bundle(target):
        if data is None:
            raise DataError(f"{target} is a bundle and knows no corpus. Name one with --data.")
        bundle = load(target)
        values = {
            "data": {"path": str(data), "document_border": bundle.document_border},
            "model": bundle.model.section.model_dump(),
            "train": {"segment_len": bundle.segment_len, "memory_len": bundle.memory_len},
        }
        config = config_from_dict(values, source=str(target))
        return bundle.model, bundle.tokenizer.fingerprint, config, f"{target}, step {bundle.source.get('step')}"
    trained = read_trained(target)
    model = network_of(
        trained.config.model,
        vocab_size=trained.tokenizer.vocab_size,
        weights=trained.weights,
        dtype="fp32",
        where=str(trained.folder),
    )
    config = trained.config
    if data is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"path": str(data)})})
    return model, trained.tokenizer.fingerprint, config, str(trained.folder)


def _score_model(model: TransformerXL, corpus: Corpus, config: Config, *, without_memory: bool) -> dict[str, Result]:
    results = {}
    with joined_ranks(timeout_s=config.engine.timeout_s, num_threads=config.engine.num_threads) as ranks:
        module = SegmentLoss(model).to(ranks.device).eval()

        @torch.no_grad()
        def losses(batch: Batch, memory: Memory) -> tuple[Tensor, Memory]:
            nll_BT, memory = module(batch, memory)
            return nll_BT, memory

        maker = batch_maker(model, mask_documents=config.data.document_border == "mask")
        for name, memory_len in {"model": config.eval.memory_len, "memory off": 0}.items():
            if name == "model" or without_memory:
                result = evaluate(
                    losses, model.empty_memory, corpus, maker=maker, config=config, ranks=ranks, memory_len=memory_len
                )
                results[name] = {key: float(value) for key, value in result._asdict().items()}
    return results


def _score_baselines(corpus: Corpus, config: Config) -> dict[str, Result]:
    train, held_out = corpus.split(config.data.train_split), corpus.split(config.data.eval_split)
    scores = order0_and_bigram(train.read_all(), held_out.read_all(), vocab_size=corpus.vocab_size)
    return {
        name: {
            "loss": loss,
            "tokens": float(scores.num_targets),
            **held_out.bits_per_unit(loss),
        }
        for name, loss in (("order 0", scores.order0), (f"bigram (k = {scores.best_k:g})", scores.bigram))
    }


def _table(results: dict[str, Result]) -> list[str]:
    lines = [f"{'':<18}{'bits/byte':>10}{'bits/char':>10}{'nats/token':>12}{'tokens':>12}"]
    for name, values in results.items():
        bits = f"{values['bits_per_byte']:>10.4f}{values['bits_per_character']:>10.4f}"
        lines.append(f"{name:<18}{bits}{values['loss']:>12.4f}{int(values['tokens']):>12,}")
    return lines
