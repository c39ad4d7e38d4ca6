"""Adapter that runs a bundle in lm-evaluation-harness (extra `harness`). The adapter has the command line of `lm_eval`:

    python -m txl_dist.inference.lm_eval_adapter --model txl --model_args path=BUNDLE,memory_len=1000 --tasks ...

The module registers the model before the harness starts, because `lm_eval` does not search other packages for models. A
program calls:

    lm_eval.simple_evaluate(model=HarnessModel(LanguageModel(load_bundle(path))), tasks=[...])

Each text begins a document. An end-of-text token precedes the text if the model was trained to begin documents with it.
No text is truncated. A text is read in segments, and a token sees as many past tokens as the memory holds. Texts of
similar length are read together.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self, TypeVar, get_args

import torch
from torch import Tensor

from txl_dist.console.echo import echo
from txl_dist.console.logging import logger
from txl_dist.errors import ConfigError, TxlError
from txl_dist.inference.bundle import load_bundle
from txl_dist.inference.language_model import LanguageModel
from txl_dist.inference.lm_eval_settings import read_generation_settings
from txl_dist.inference.options import InferencePrecision

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
    """Text whose last tokens are scored."""

    ids: list[int]
    num_scored: int
    """Number of tokens at the end of `ids` that are scored."""


@register_model("txl")
class HarnessModel(TemplateLM):  # type: ignore[misc]  # the harness is not typed
    """Model of a bundle in the form that lm-evaluation-harness calls. `lm` is the open model.

    `memory_len` is the number of past tokens that a text sees, and -1 means as many as in training. `batch_size` is the
    number of texts that run together.
    """

    def __init__(self, lm: LanguageModel, *, memory_len: int = -1, batch_size: int = 16) -> None:
        super().__init__()
        self.lm = lm
        self.memory_len = memory_len
        self.uses_memory = lm.network.section.scheme.uses_memory
        self.batch_size = batch_size if self.uses_memory else 1  # positions may be counted from the end of a row
        self._device = lm.device
        self._warned: set[str] = set()

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Self:
        """Open a model for the harness from the text of `--model_args`:
        `path=BUNDLE,memory_len=TOKENS,precision=bf16`.

        Raises ConfigError for other arguments, and CheckpointError for a bundle that cannot be read.
        """
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        """Open a model for the harness from a dictionary with `path`, `memory_len` and `precision`, as
        `create_from_arg_string` does.

        `additional_config` has the harness's `batch_size` and `device`. A batch size of `auto` means 16.
        """
        arguments = dict(arg_dict)
        config = additional_config or {}
        path = arguments.pop("path", None)
        memory_len = arguments.pop("memory_len", -1)
        precision = arguments.pop("precision", "stored")
        precisions = get_args(InferencePrecision)
        if path is None or arguments or not isinstance(memory_len, int) or precision not in precisions:
            raise ConfigError(
                f"--model_args {arg_dict}: give path=BUNDLE and optionally memory_len=TOKENS and "
                f"precision={'|'.join(precisions)}. Other keys are not allowed."
            )
        size = str(config.get("batch_size") or "auto")
        batch_size = 16
        if size.isdigit() and int(size):
            batch_size = int(size)
        device = "cpu"
        if torch.cuda.is_available():  # the harness names a GPU even where there is none
            device = config.get("device") or "cpu"
        bundle = load_bundle(str(path), device=device).in_precision(precision, device=device, where=str(path))
        lm = LanguageModel(bundle)
        return cls(lm, memory_len=memory_len, batch_size=batch_size)

    @property
    def eot_token_id(self) -> int:
        """Id of the end-of-text token, with which the harness replaces an empty context.

        Raises ConfigError if the model cannot begin a document.
        """
        end_of_text = self.lm.tokenizer.end_of_text
        if end_of_text is None or not self.lm.bundle.begins_documents:
            raise ConfigError(
                "a context of this task is empty, but this model cannot begin a document: the model has no end-of-text "
                "token, or was not trained on the first tokens of documents. Choose another task."
            )
        return end_of_text

    @property
    def tokenizer_name(self) -> str:
        """Fingerprint of the tokenizer, by which the harness's cache of requests identifies the tokenizer."""
        return self.lm.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text, without an end-of-text token at its beginning or end."""
        return self.lm.encode(string)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability in nats of each request's whole text. Each text is scored as a separate
        document."""

        def score(texts: Sequence[str]) -> list[float]:
            rows = []
            for text in texts:
                ids = [int(i) for i in self.lm.tokenizer.encode(text)]
                rows.append(self._with_end_of_text(ids))
            scores = self.lm.score_batch(rows, memory_len=self.memory_len)
            return [float(log_p_S.double().sum()) for log_p_S in scores]

        texts = [request.args[0] for request in requests]
        log_ps = self._in_batches(texts, score, length=len)
        for request, log_p in zip(requests, log_ps, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, log_p)
        return log_ps

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return a text that continues each request's context and ends before the first of its `until` strings.

        The most probable token is taken unless the request asks for sampling. A warning names each setting that is not
        used, once per evaluation (see `lm_eval_settings`).
        """
        indices_by_settings: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            settings = request.args[1] or {}
            indices_by_settings[repr(sorted(settings.items()))].append(index)
        results = [""] * len(requests)
        for indices in indices_by_settings.values():
            values, unused = read_generation_settings(requests[indices[0]].args[1])
            self._warn_once(unused)
            settings = {**values, "memory_len": self.memory_len, "batch_size": self.batch_size}
            contexts = [requests[index].args[0] for index in indices]
            generations = self.lm.generate_batch(contexts, **settings)
            for index, (generation,) in zip(indices, generations, strict=True):
                results[index] = generation.text
                self.cache_hook.add_partial("generate_until", requests[index].args, generation.text)
        return results

    def _warn_once(self, sentences: Sequence[str]) -> None:
        """Log each sentence that has not been logged before."""
        for sentence in sentences:
            if sentence not in self._warned:
                self._warned.add(sentence)
                logger.warning("generation setting %s", sentence)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-probability in nats, is greedy) of each request's continuation.

        The second item is True if each token of the continuation is the most probable token at its position.
        """
        rows = [_Row([*self._with_end_of_text(context), *ids], len(ids)) for _, context, ids in requests]
        results = self._in_batches(rows, self._scored, length=lambda row: len(row.ids))
        for (pair, _, _), result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", pair, result)
        return results

    def _with_end_of_text(self, ids: list[int]) -> list[int]:
        """Put an end-of-text token before the ids if the model begins documents with this token.

        Ids that already begin with an end-of-text token stay unchanged.
        """
        end_of_text = self.lm.tokenizer.end_of_text
        if end_of_text is None or not self.lm.bundle.begins_documents or ids[:1] == [end_of_text]:
            return ids
        return [end_of_text, *ids]

    def _in_batches(
        self, items: Sequence[Any], answer: Callable[[Sequence[Any]], list[T]], *, length: Callable[[Any], int]
    ) -> list[T]:
        """Call `answer` with batches of items of similar length. Returns the results in the order of the items."""
        order = sorted(range(len(items)), key=lambda index: -length(items[index]))
        results: dict[int, T] = {}
        for start in range(0, len(order), self.batch_size):
            indices = order[start : start + self.batch_size]
            batch = [items[index] for index in indices]
            results.update(zip(indices, answer(batch), strict=True))
        return [results[index] for index in range(len(items))]

    @torch.inference_mode()
    def _scored(self, rows: Sequence[_Row]) -> list[tuple[float, bool]]:
        """Score the last `num_scored` tokens of each row. Returns the same values as `_loglikelihood_tokens`."""
        longest = max(len(row.ids) for row in rows)
        tokens_BS = torch.zeros(len(rows), longest, dtype=torch.int64)
        is_scored_BS = torch.zeros(tokens_BS.shape, dtype=torch.bool)
        for index, (ids, num_scored) in enumerate(rows):
            tokens_BS[index, : len(ids)] = torch.tensor(ids)
            is_scored_BS[index, len(ids) - num_scored : len(ids)] = True
        total_B = torch.zeros(len(rows), dtype=torch.float64)
        num_likeliest_B = torch.zeros(len(rows), dtype=torch.int64)
        num_positions = max(1, _MOST_LOGITS // self.lm.network.vocab_size)
        softmax = self.lm.network.softmax
        if self.uses_memory:
            tables = self.lm.frozen.tables
        else:
            tables = None
        for start, hidden_BTD in self._hidden(tokens_BS.to(self.lm.device)):
            is_target_BT = is_scored_BS[:, start + 1 : start + 1 + hidden_BTD.shape[1]]
            for places_R2 in is_target_BT.nonzero().split(num_positions):
                row_R, place_R = places_R2.unbind(1)
                log_p_RV = softmax.log_probabilities(hidden_BTD[row_R, place_R], tables=tables).cpu()
                target_R = tokens_BS[row_R, start + 1 + place_R]
                log_p_R = log_p_RV.gather(1, target_R[:, None])[:, 0]
                is_likeliest_R = log_p_RV.argmax(1) == target_R
                total_B.index_add_(0, row_R, log_p_R.double())
                num_likeliest_B.index_add_(0, row_R, is_likeliest_R.long())
        results = []
        for total, num_likeliest, row in zip(total_B, num_likeliest_B, rows, strict=True):
            results.append((float(total), int(num_likeliest) == row.num_scored))
        return results

    def _hidden(self, tokens_BS: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Run all tokens except the last, in segments. Yields (number of the first position, hidden_BTD) of each
        segment."""
        lm = self.lm
        num_rows, num_tokens = tokens_BS.shape
        segment_len = lm.bundle.segment_len
        ring = None
        if self.uses_memory:
            ring = lm.empty_memory(num_rows=num_rows, memory_len=self.memory_len, chunk_len=segment_len)
        for start in range(0, num_tokens - 1, segment_len):
            stop = min(start + segment_len, num_tokens - 1)
            segment_BT = tokens_BS[:, start:stop]
            if ring is None:
                memory = lm.network.empty_memory(num_lanes=num_rows, memory_len=0)
                hidden_BTD, _ = lm.network(segment_BT, memory)
                yield start, hidden_BTD
            else:
                yield start, lm.frozen.run(segment_BT, ring)


if __name__ == "__main__":
    try:
        cli_evaluate()
    except TxlError as error:
        echo(f"error: {error}", to=sys.stderr)
        sys.exit(error.exit_code)
