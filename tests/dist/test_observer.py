"""Reported values of the model are equal at every ZeRO stage, are right, and do not change the training."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.corpora import tiny_corpus
from tests.helpers.forked import ENVIRONMENT
from tests.helpers.models import generated
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_config
from txl_dist.config.load import Config, config_to_toml, plan_batch
from txl_dist.data.loader.corpus import Corpus, open_corpus
from txl_dist.data.loader.evaluation import EvalStream
from txl_dist.data.loader.shards import Split
from txl_dist.distributed.collectives import RankInfo
from txl_dist.model.attention import Attention
from txl_dist.model.memory import AttentionMask, empty_memory
from txl_dist.model.relative_attention import Terms, relative_attention
from txl_dist.model.transformer_xl import SegmentLoss
from txl_dist.train.batch import BatchMaker, batch_maker
from txl_dist.train.engine.zero import ZeroEngine
from txl_dist.train.report.evaluation_loss import POSITION_BINS, evaluate_split
from txl_dist.train.report.memory_stats import NUM_SEGMENTS, measure_memory
from txl_dist.train.report.sample_text import sample_text
from txl_dist.train.run_plan import evaluation_plan

pytestmark = pytest.mark.dist

NUMBERS = dict[str, Any]


def config_of(stage: int, **sections: dict[str, Any]) -> Config:
    values = {"model": {"cutoffs": [10, 25], "init_std": 0.2}, "metrics": {"sample_prompt": "no", "sample_len": 12}}
    values |= {"engine": {"zero_stage": stage}, "eval": {"num_lanes": 3}, **sections}
    return tiny_config(**values)


def measured(
    engine: Any, split: Split, maker: BatchMaker, config: Config, ranks: RankInfo, *, step: int
) -> dict[str, Any] | None:
    """The memory record of these settings."""
    return measure_memory(
        engine,
        split,
        maker=maker,
        num_lanes=config.eval.num_lanes,
        segment_len=config.train.segment_len,
        memory_len=config.train.memory_len,
        ranks=ranks,
        step=step,
    )


def observing_worker(ranks: RankInfo, stage: int, folder: str) -> NUMBERS:
    """All that is shown, and whether a parameter, the generator or the mode of the model changed by it."""
    config, corpus = config_of(stage), open_corpus(folder)
    plan = plan_batch(config.train, world_size=ranks.world_size)
    engine = ZeroEngine(config, vocab_size=corpus.vocab_size, plan=plan, ranks=ranks)
    maker, split = batch_maker(engine.model, mask_documents=False), corpus.split("valid")
    before = [value.clone() for _, value in engine.named_values()]
    generator = torch.get_rng_state()
    record = measured(engine, split, maker, config, ranks, step=7)
    text = sample_text(engine, corpus.tokenizer, config, device=ranks.device, seed=5)
    result = evaluate_split(engine, split, maker=maker, plan=evaluation_plan(config), ranks=ranks)
    after = [value for _, value in engine.named_values()]
    # At stage 3 small parameters stay gathered from their first use on.
    same = [torch.equal(old, new) for old, new in zip(before, after, strict=True) if len(old)]
    is_untouched = all(same) and torch.equal(generator, torch.get_rng_state()) and engine.model.training
    watched = [layer for layer in engine.model.modules() if isinstance(layer, Attention) and "attend" in vars(layer)]
    return {
        "memory": {name: value for name, value in record.items() if name != "seconds"},
        "text": text,
        "evaluation": result.record(7) | {"seconds": 0.0},
        "is_untouched": is_untouched and not watched,
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return tiny_corpus(tmp_path_factory.mktemp("observer"))


@pytest.mark.slow  # three lanes on two ranks: one is padding
def test_every_stage_shows_the_same_and_changes_nothing(tmp_path: Path, corpus: Corpus) -> None:
    alone = run_ranks(observing_worker, 0, corpus.location, world_size=1, folder=tmp_path)[0]
    assert alone["is_untouched"]
    assert set(alone["memory"]) >= {"step", "tokens", "memory_gain", "memory_norm_1", "memory_attention_pct_1"}
    for stage in (1, 3):
        for found in run_ranks(observing_worker, stage, corpus.location, world_size=2, folder=tmp_path):
            assert found["is_untouched"]
            assert found["text"] == alone["text"]
            for kind in ("memory", "evaluation"):
                assert found[kind].keys() == alone[kind].keys()
                for name, value in alone[kind].items():
                    assert found[kind][name] == pytest.approx(value, abs=2e-5, nan_ok=True), (stage, kind, name)


class PlainEngine:
    """A network without DeepSpeed."""

    def __init__(self, config: Config, *, vocab_size: int) -> None:
        from txl_dist.model.transformer_xl import TransformerXL

        torch.manual_seed(3)
        self.model = TransformerXL(config.model, vocab_size=vocab_size, attention="plain").eval()
        self.module = SegmentLoss(self.model)

    @torch.no_grad()
    def losses(self, batch, memory):  # type: ignore[no-untyped-def]
        return self.module(batch, memory)

    @torch.no_grad()
    def predict(self, batch, memory):  # type: ignore[no-untyped-def]
        return self.module(batch, memory, None, True)

    def empty_memory(self, *, num_lanes: int, memory_len: int):  # type: ignore[no-untyped-def]
        return self.model.empty_memory(num_lanes=num_lanes, memory_len=memory_len)


RANK = RankInfo(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"), num_threads=1)


@pytest.fixture
def no_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("memory_stats", "evaluation_loss"):
        monkeypatch.setattr(f"txl_dist.train.report.{module}.all_reduce_sum", lambda values: values)


def naive_share(terms: Terms, *, visible: AttentionMask) -> float:
    """Probabilities themselves: attention with one-hot values, one key at a time, summed over the memory."""
    total = 0.0
    for index in range(visible.memory_len):
        one = torch.zeros_like(terms.value_BKNH)
        one[:, index] = 1.0
        total += float(relative_attention(terms._replace(value_BKNH=one), visible=visible).mean())
    return total


def test_the_share_of_attention_is_that_of_the_probabilities(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, no_other_ranks: None
) -> None:
    config = config_of(0)
    engine: Any = PlainEngine(config, vocab_size=corpus.vocab_size)
    maker = batch_maker(engine.model, mask_documents=False)
    record = measured(engine, corpus.split("valid"), maker, config, RANK, step=1)
    layer = engine.model.blocks[1].attention
    found: list[float] = []
    attend = layer.attend

    def spy(terms: Terms, *, visible: AttentionMask) -> torch.Tensor:
        found.append(naive_share(terms, visible=visible))
        return attend(terms, visible=visible)

    monkeypatch.setattr(layer, "attend", spy)
    stream = EvalStream(corpus.split("valid"), num_lanes=3, segment_len=8)
    memory = engine.empty_memory(num_lanes=3, memory_len=12)
    squares = []
    for segment in itertools.islice(stream, 2 + NUM_SEGMENTS):  # two segments fill 12 tokens
        squares.append(torch.stack(memory.hidden)[1].square().mean().item())
        _, memory = engine.losses(maker.batch(segment), memory)
    assert record["memory_attention_pct_1"] == pytest.approx(100 * np.mean(found[2:]), abs=1e-4)
    assert record["memory_norm_1"] == pytest.approx(math.sqrt(np.mean(squares[2:])), abs=1e-5)
    assert 5 < record["memory_attention_pct_1"] < 95


def test_a_split_that_fills_no_memory_is_not_measured(tmp_path: Path, no_other_ranks: None) -> None:
    short = tiny_corpus(tmp_path, texts=["abcdefgh" * 30, "abc"], valid_fraction=0.5, shard_len=4000)
    config = config_of(0, eval={"num_lanes": 1}, train={"segment_len": 400, "memory_len": 12})
    engine: Any = PlainEngine(config, vocab_size=short.vocab_size)
    maker = batch_maker(engine.model, mask_documents=False)
    assert short.split("valid").tokens < 400
    assert measured(engine, short.split("valid"), maker, config, RANK, step=1) is None


def test_without_memory_means_that_each_segment_stands_alone(corpus: Corpus, no_other_ranks: None) -> None:
    config = config_of(0)
    engine: Any = PlainEngine(config, vocab_size=corpus.vocab_size)
    maker = batch_maker(engine.model, mask_documents=False)
    record = measured(engine, corpus.split("valid"), maker, config, RANK, step=1)
    nlls = []
    for segment in itertools.islice(EvalStream(corpus.split("valid"), num_lanes=3, segment_len=8), 2, 2 + NUM_SEGMENTS):
        nothing = empty_memory([0, 0], num_lanes=3, width=32, like=torch.empty(0))
        nlls.append(engine.losses(maker.batch(segment), nothing)[0])
    alone_T = torch.stack(nlls).mean((0, 1))
    assert record["loss_by_position_without_memory"] == pytest.approx(alone_T.tolist(), abs=1e-5)
    assert record["memory_gain"] == pytest.approx(
        np.mean(record["loss_by_position_without_memory"]) - np.mean(record["loss_by_position"]), abs=1e-5
    )
    assert abs(record["memory_gain"]) > 1e-4


def test_losses_by_position_and_by_cluster_are_means_over_their_targets(corpus: Corpus, no_other_ranks: None) -> None:
    config = config_of(0, train={"segment_len": 40, "memory_len": 12}, eval={"num_lanes": 3})
    engine: Any = PlainEngine(config, vocab_size=corpus.vocab_size)
    split, maker = corpus.split("valid"), batch_maker(engine.model, mask_documents=False)
    result = evaluate_split(engine, split, maker=maker, plan=evaluation_plan(config), ranks=RANK)
    rows = []  # (position, target, nats) of every scored target
    memory = engine.empty_memory(num_lanes=3, memory_len=12)
    for segment in EvalStream(split, num_lanes=3, segment_len=40):
        batch = maker.batch(segment)
        nll_BT, memory = engine.losses(batch, memory)
        for lane, position in zip(*np.nonzero(segment.scored), strict=True):
            rows.append((position, int(batch.targets_BT[lane, position]), float(nll_BT[lane, position])))
    position, target, nats = (np.array(column) for column in zip(*rows, strict=True))
    means = result.means
    assert means.tokens == len(rows) == split.tokens - 1
    assert means.loss == pytest.approx(nats.mean(), abs=1e-6)
    edges = np.floor(np.linspace(0, 40, POSITION_BINS + 1)).astype(int)
    bins = [nats[(position >= low) & (position < high)] for low, high in itertools.pairwise(edges)]
    assert [part.loss for part in means.by_position] == pytest.approx([one.mean() for one in bins], abs=1e-6)
    assert [part.tokens for part in means.by_position] == [len(one) for one in bins]
    assert [(part.first, part.last + 1) for part in means.by_position] == list(itertools.pairwise(edges))
    ranges = ((0, 10), (10, 25), (25, split.corpus.vocab_size))
    clusters = [nats[(target >= low) & (target < high)] for low, high in ranges]
    expected = [float(one.mean()) if len(one) else math.nan for one in clusters]
    assert [part.loss for part in means.by_cluster] == pytest.approx(expected, abs=1e-6, nan_ok=True)
    assert [(part.first, part.last + 1, part.tokens) for part in means.by_cluster] == [
        (*edges, len(one)) for edges, one in zip(ranges, clusters, strict=True)
    ]
    assert len([loss for loss in expected if not math.isnan(loss)]) >= 2


def test_an_evaluation_of_a_part_of_a_split_records_no_bits_of_its_text(corpus: Corpus, no_other_ranks: None) -> None:
    split = corpus.split("valid")
    engine: Any = PlainEngine(config_of(0), vocab_size=corpus.vocab_size)
    maker, found = batch_maker(engine.model, mask_documents=False), {}
    for max_tokens in (0, 50):
        config = config_of(0, eval={"max_tokens": max_tokens})
        result = evaluate_split(engine, split, maker=maker, plan=evaluation_plan(config), ranks=RANK)
        found[max_tokens] = result.record(3)
    assert (found[0]["tokens"], found[50]["tokens"]) == (split.tokens - 1, 49)
    assert found[0].keys() - found[50].keys() == {"bits_per_byte", "bits_per_character"}


WITHOUT_ITS_TOKENIZER = """
from pathlib import Path
from txl_dist.config.load import Config, load_config
from txl_dist.train import start
class Run(start.TrainingRun):
    def go(self):
        Path("corpus/tokenizer.json").unlink()
        return super().go()
start.TrainingRun = Run
print(start.pretrain(load_config("tiny.toml")).ended == "done")
"""


def test_once_a_run_is_built_no_rank_asks_the_storage_for_the_tokenizer(tmp_path: Path) -> None:
    tiny_corpus(tmp_path)
    config = config_of(0, run={"dir": "run"}, data={"path": "corpus"}, train={"max_steps": 2})
    (tmp_path / "tiny.toml").write_text(config_to_toml(config), encoding="utf-8")
    command = [sys.executable, "-c", WITHOUT_ITS_TOKENIZER]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("True\n"), done.stderr[-3000:]
    assert '"bits_per_byte"' in (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize("prompt", ["", "no"])
def test_a_model_trained_with_document_masks_sees_the_end_of_text_that_opens_its_document(
    prompt: str, corpus: Corpus
) -> None:
    config = config_of(0, data={"document_mask": True}, metrics={"sample_prompt": prompt, "sample_len": 5})
    engine: Any = PlainEngine(config, vocab_size=corpus.vocab_size)
    predict, seen = engine.predict, []
    engine.predict = lambda batch, memory: (seen.append(batch.tokens_BT[0].tolist()), predict(batch, memory))[1]
    tokenizer = corpus.tokenizer
    sample_text(engine, tokenizer, config, device=torch.device("cpu"), seed=5)
    assert seen[0] == [tokenizer.end_of_text, *tokenizer.encode_prompt(prompt)]


def test_a_model_that_has_diverged_writes_nothing_and_raises_nothing(corpus: Corpus) -> None:
    config = config_of(0)
    engine: Any = PlainEngine(config, vocab_size=corpus.vocab_size)
    predict, calls = engine.predict, []

    def diverging(batch, memory):  # type: ignore[no-untyped-def]
        calls.append(1)
        log_p, memory = predict(batch, memory)
        return (log_p * math.nan if len(calls) > 4 else log_p), memory

    engine.predict = diverging
    tokenizer = corpus.tokenizer
    text = sample_text(engine, tokenizer, config, device=torch.device("cpu"), seed=5)
    whole = sample_text(
        PlainEngine(config, vocab_size=corpus.vocab_size), tokenizer, config, device=RANK.device, seed=5
    )  # type: ignore[arg-type]
    assert len(text) <= 4 < len(whole)
    assert len(calls) == 12, "all ranks make as many passes, whatever they find"


@pytest.mark.parametrize("prompt", ["", "no", "no more than a segment holds"])
@pytest.mark.parametrize("same_length", ["off", "memory"])
def test_a_sample_is_what_generation_writes_with_its_cache(prompt: str, same_length: str, corpus: Corpus) -> None:
    config = config_of(
        0,
        model={"init_std": 0.2, "same_length": same_length},
        metrics={"sample_prompt": prompt, "sample_len": 25},
    )
    tokenizer = corpus.tokenizer
    engine: Any = PlainEngine(config, vocab_size=corpus.vocab_size)
    text = sample_text(engine, tokenizer, config, device=torch.device("cpu"), seed=11)
    ids = [tokenizer.end_of_text, *tokenizer.encode_prompt(prompt)]
    written = generated(
        engine.model, ids, max_tokens=25, segment_len=8, memory_len=12, seed=11, stop_at=tokenizer.end_of_text
    )
    assert text == "".join(tokenizer.decode_stream(written, after=ids))
    assert text


def test_a_model_without_memory_writes_too(tmp_path: Path, corpus: Corpus) -> None:
    config = config_of(
        0, model={"positions": "absolute"}, train={"memory_len": 0}, metrics={"sample_prompt": "a", "sample_len": 20}
    )
    engine: Any = PlainEngine(config, vocab_size=corpus.vocab_size)
    tokenizer = corpus.tokenizer
    text = sample_text(engine, tokenizer, config, device=torch.device("cpu"), seed=2)
    ids = [tokenizer.end_of_text, *tokenizer.encode_prompt("a")]
    written = generated(
        engine.model, ids, max_tokens=20, segment_len=8, memory_len=0, seed=2, stop_at=tokenizer.end_of_text
    )
    assert text == "".join(tokenizer.decode_stream(written, after=ids))
