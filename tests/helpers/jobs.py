"""The context of a run without a corpus, for tests of parts of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from txl_dist.config.load import Config, plan_batch
from txl_dist.config.phases import saved_settings
from txl_dist.distributed.collectives import RankInfo
from txl_dist.tokenizers.base import Tokenizer
from txl_dist.tokenizers.training import train_tokenizer
from txl_dist.train.run_plan import stage_context
from txl_dist.train.state import RunContext

TOKENIZER = train_tokenizer("byte", lambda: ["some text"])


def job_of(config: Config, ranks: RankInfo, *, tokenizer: Tokenizer = TOKENIZER, vocab_size: int = 0) -> RunContext:
    """Return the context of a run with these settings. Its corpora have a tokenizer, but no text."""
    corpus: Any = SimpleNamespace(
        tokenizer=tokenizer, tokenizer_sha256=tokenizer.fingerprint, vocab_size=vocab_size or tokenizer.vocab_size
    )
    corpora: Any = SimpleNamespace(first=corpus)
    plan, steps = plan_batch(config.train, world_size=ranks.world_size), range(config.train.max_steps)
    return stage_context(config, saved_settings(config), plan, ranks, corpora, steps=steps)


def in_folder(config: Config, folder: object) -> Config:
    """Return the same settings for a run in another folder."""
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": str(folder)})})
