"""lm-evaluation-harness over a bundle (extra `harness`), with the arguments of its own `lm_eval`:

    python -m txl_dist.inference.lm_eval_adapter --model txl --model_args path=BUNDLE,memory_len=1000 --tasks ...

which registers the model first, since lm_eval looks for none outside of itself. From a program:
`lm_eval.simple_evaluate(model=HarnessModel(LanguageModel(load_bundle(path))), tasks=[...])`.

A text begins a document, as in training: an end-of-text stands before it where the model learnt to begin with one. No
text is cut off: it is read in segments, and what a token sees of it is what the memory holds. Texts of like length are
read together.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from txl_dist.console.echo import echo
from txl_dist.console.logging import logger
from txl_dist.errors import ConfigError, TxlError
from txl_dist.inference.bundle import load_bundle
from txl_dist.inference.language_model import LanguageModel
from txl_dist.inference.lm_eval_settings import read_generation_settings

try:
    import lm_eval.models  # noqa: F401  the harness's own, which are found no more once another is registered
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import simple_parse_args_string
except ModuleNotFoundError as error:
    problem = f"lm-evaluation-harness is missing ({error}): pip install 'txl_dist[harness]'"
    if __name__ == "__main__":
        echo(f"error: {problem}", to=sys.stderr)
        sys.exit(ConfigError.exit_code)
    raise ConfigError(problem) from error

T = TypeVar("T")
_MOST_LOGITS = 1 << 22


class _Row(NamedTuple):
    ids: list[int]
    num_scored: int
    """At the end."""


@register_model("txl")
class HarnessModel(TemplateLM):  # type: ignore[misc]  # the harness is not typed
    """A language model as the harness asks it. `memory_len` -1 is as trained."""

    def __init__(self, lm: LanguageModel, *, memory_len: int = -1, batch_size: int = 16) -> None:
        super().__init__()
        self.lm, self.memory_len = lm, memory_len
        self.uses_memory = lm.network.section.scheme.uses_memory
        self.batch_size = batch_size if self.uses_memory else 1  # places may be counted from the end of a row
        self._device = lm.device
        self._warned: set[str] = set()

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Self:
        """Of `path=BUNDLE`, and `memory_len`. Raises ConfigError for other names, CheckpointError for the bundle."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        """The same, of a dictionary. `--batch_size auto` is 16."""
        given, config = dict(arg_dict), additional_config or {}
        path, memory_len = given.pop("path", None), given.pop("memory_len", -1)
        if path is None or given or not isinstance(memory_len, int):
            raise ConfigError(f"--model_args {arg_dict}: give path=BUNDLE and, if wanted, memory_len=TOKENS, no more.")
        size = str(config.get("batch_size") or "auto")
        device = (torch.cuda.is_available() and config.get("device")) or "cpu"  # it names a GPU where there is none
        lm = LanguageModel(load_bundle(str(path), device=device))
        return cls(lm, memory_len=memory_len, batch_size=int(size) if size.isdigit() and int(size) else 16)

    @property
    def eot_token_id(self) -> int:
        """What an empty context is. Raises ConfigError where the model cannot begin a document."""
        end_of_text = self.lm.tokenizer.end_of_text
        if end_of_text is None or not self.lm.bundle.begins_documents:
            raise ConfigError("this model cannot begin a document, and a context is empty. Choose another task.")
        return end_of_text

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of requests."""
        return self.lm.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text that may go on, without an end-of-text."""
        return self.lm.encode(string)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """log p in nats of whole texts, each a document."""

        def score(texts: Sequence[str]) -> list[float]:
            rows = [self._begun([int(i) for i in self.lm.tokenizer.encode(text)]) for text in texts]
            scores = self.lm.score_batch(rows, memory_len=self.memory_len)
            return [float(one.double().sum()) for one in scores]

        found = self._in_batches([one.args[0] for one in requests], score, length=len)
        for one, log_p in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", one.args, log_p)
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts that continue contexts, up to the first of their `until`; the likeliest tokens unless told otherwise.

        A setting that has no meaning here is said once, and not used (harness_settings.py).
        """
        alike: dict[str, list[int]] = defaultdict(list)
        for index, one in enumerate(requests):
            alike[repr(sorted((one.args[1] or {}).items()))].append(index)
        made = [""] * len(requests)
        for indices in alike.values():
            values, unused = read_generation_settings(requests[indices[0]].args[1])
            self._warn_once(unused)
            settings = {**values, "memory_len": self.memory_len, "batch_size": self.batch_size}
            texts = self.lm.generate_batch([requests[index].args[0] for index in indices], **settings)
            for index, (text,) in zip(indices, texts, strict=True):
                made[index] = text.text
                self.cache_hook.add_partial("generate_until", requests[index].args, text.text)
        return made

    def _warn_once(self, sentences: Sequence[str]) -> None:
        for sentence in sentences:
            if sentence not in self._warned:
                self._warned.add(sentence)
                logger.warning("generation setting %s", sentence)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(log p in nats of a continuation, whether each of its tokens is the likeliest)."""
        rows = [_Row([*self._begun(context), *ids], len(ids)) for _, context, ids in requests]
        found = self._in_batches(rows, self._scored, length=lambda row: len(row.ids))
        for (pair, *_), answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", pair, answer)
        return found

    def _begun(self, ids: list[int]) -> list[int]:
        """Behind an end-of-text, where the model begins documents so."""
        end_of_text = self.lm.tokenizer.end_of_text
        begins = end_of_text is not None and self.lm.bundle.begins_documents and ids[:1] != [end_of_text]
        return [end_of_text, *ids] if begins and end_of_text is not None else ids

    def _in_batches(
        self, items: Sequence[Any], answer: Callable[[Sequence[Any]], list[T]], *, length: Callable[[Any], int]
    ) -> list[T]:
        """What `answer` gives for items of like length together, in the order of the items."""
        order = sorted(range(len(items)), key=lambda index: -length(items[index]))
        found: dict[int, T] = {}
        for start in range(0, len(order), self.batch_size):
            some = order[start : start + self.batch_size]
            found.update(zip(some, answer([items[index] for index in some]), strict=True))
        return [found[index] for index in range(len(items))]

    @torch.inference_mode()
    def _scored(self, rows: Sequence[_Row]) -> list[tuple[float, bool]]:
        tokens_BS = torch.zeros(len(rows), max(len(row.ids) for row in rows), dtype=torch.int64)
        is_scored_BS = torch.zeros(tokens_BS.shape, dtype=torch.bool)
        for index, (ids, num_scored) in enumerate(rows):
            tokens_BS[index, : len(ids)] = torch.tensor(ids)
            is_scored_BS[index, len(ids) - num_scored : len(ids)] = True
        total_B, num_likeliest_B = (
            torch.zeros(len(rows), dtype=torch.float64),
            torch.zeros(len(rows), dtype=torch.int64),
        )
        num_positions = max(1, _MOST_LOGITS // self.lm.network.vocab_size)
        softmax, tables = self.lm.network.softmax, self.lm.frozen.tables if self.uses_memory else None
        for start, hidden_BTD in self._hidden(tokens_BS.to(self.lm.device)):
            is_target_BT = is_scored_BS[:, start + 1 : start + 1 + hidden_BTD.shape[1]]
            for places_R2 in is_target_BT.nonzero().split(num_positions):
                row_R, place_R = places_R2.unbind(1)
                log_p_RV = softmax.log_probabilities(hidden_BTD[row_R, place_R], tables=tables).cpu()
                target_R = tokens_BS[row_R, start + 1 + place_R]
                total_B.index_add_(0, row_R, log_p_RV.gather(1, target_R[:, None])[:, 0].double())
                num_likeliest_B.index_add_(0, row_R, (log_p_RV.argmax(1) == target_R).long())
        return [
            (float(total), int(num_likeliest) == row.num_scored)
            for total, num_likeliest, row in zip(total_B, num_likeliest_B, rows, strict=True)
        ]

    def _hidden(self, tokens_BS: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(first place, hidden_BTD) of each segment, without the last token."""
        lm, (num_rows, num_tokens) = self.lm, tokens_BS.shape
        segment_len, ring = lm.bundle.segment_len, None
        if self.uses_memory:
            ring = lm.empty_memory(num_rows=num_rows, memory_len=self.memory_len, chunk_len=segment_len)
        for start in range(0, num_tokens - 1, segment_len):
            segment_BT = tokens_BS[:, start : min(start + segment_len, num_tokens - 1)]
            if ring is None:
                yield start, lm.network(segment_BT, lm.network.empty_memory(num_lanes=num_rows, memory_len=0))[0]
            else:
                yield start, lm.frozen.run(segment_BT, ring)


if __name__ == "__main__":
    try:
        cli_evaluate()
    except TxlError as error:
        echo(f"error: {error}", to=sys.stderr)
        sys.exit(error.exit_code)
