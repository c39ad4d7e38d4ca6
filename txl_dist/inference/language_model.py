"""A trained model to hold in one's own program: it scores, writes, remembers and shows its hidden states.

import txl_dist

lm = txl_dist.load("bundles/first")                  # a bundle, a run or a checkpoint
lm.score("def load(path):")                          # log-probability of each token
lm.generate("def load(", max_tokens=40).text
memory = lm.memory(a_long_text)                      # read once ...
lm.generate(" and then", memory=memory).text         # ... and gone on from, as often as one likes
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from txl_dist.console.formatting import counted
from txl_dist.errors import ConfigError
from txl_dist.inference.bundle import Bundle
from txl_dist.inference.generate import Decoder, Request
from txl_dist.inference.kv_cache import FrozenModel, KVCache
from txl_dist.inference.options import SamplingParams, check_count, check_ids, check_text
from txl_dist.inference.probe import log_probabilities
from txl_dist.inference.scheduler import Completion, FinishReason, OutputChunk, Prompt, Scheduler, write
from txl_dist.inference.text_memory import TextMemory, fingerprint_of, load_memory, read_memory
from txl_dist.io.files import path_of
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.tokenizers.base import Tokenizer

Text = str | Sequence[int]
"""A text, or the ids of its tokens, which are taken as they are."""


class Generation(NamedTuple):
    """A text that was generated."""

    text: str
    """What follows the prompt."""
    ids: list[int]
    """Its tokens; a text that a stop string ended has none beyond its last whole one."""
    finish: FinishReason
    """Why it ended: `length` (it has `max_tokens`), `stop` or `end_of_text`."""
    log_probs: list[float]
    """In nats, of each token, of the model as it is, whatever the temperature."""
    top: list[list[tuple[int, float]]]
    """The likeliest ids in each token's place with their log-probabilities, where `log_probs` asked for some."""
    memory: TextMemory | None
    """What is remembered of prompt and text, if asked for."""


class LanguageModel:
    """A bundle that is open, on its device. It holds nothing of the texts it reads: memories come in and go out."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self._versions: list[tuple[int, int]] = []

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back."""
        return self.bundle.tokenizer

    @property
    def network(self) -> TransformerXL:
        """The model itself, in evaluation mode. Its weights may change between calls, in place or by `load_state_dict`:
        the next call reads them again, and refuses memories of before."""
        return self.bundle.model

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.network.embedding.weight(0).device

    @property
    def frozen(self) -> FrozenModel:
        """The cached core, of the weights as they are now. Raises ConfigError for a model without a memory."""
        self._forget_old_weights()
        return self._frozen

    @property
    def fingerprint(self) -> str:
        """sha256 of settings and weights: whose memories this model reads."""
        self._forget_old_weights()
        return self._fingerprint

    @cached_property
    def _frozen(self) -> FrozenModel:
        return FrozenModel(self.network)

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint_of(self.network)

    def _forget_old_weights(self) -> None:
        """What was made of other weights goes. torch counts what is written to a tensor, unless by way of `.data`."""
        parameters = self.network.parameters()
        versions = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in parameters]
        if versions != self._versions:
            for name in ("_frozen", "_fingerprint"):
                self.__dict__.pop(name, None)
            self._versions = versions

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without an end-of-text.

        Raises ConfigError for what is no text, DataError for what the vocabulary cannot say.
        """
        check_text(text)
        return [int(i) for i in self.tokenizer.encode_prompt(text)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids. Raises ConfigError for an id outside the vocabulary."""
        return self.tokenizer.decode(check_ids(ids, vocab_size=self.tokenizer.vocab_size, what="ids"))

    def score(
        self, text: Text, *, memory: TextMemory | None = None, memory_len: int = -1, zero_memory: bool = False
    ) -> Tensor:
        """log p in nats of each token of a text, at least fp32, [tokens].

        The first token follows an end-of-text, or the text of `memory`; without either, where a model cannot begin a
        document, it has no score. Where the training confined tokens to their documents, an end-of-text among the ids
        opens one that sees nothing of what is before it. `memory_len` may be more than in training; -1 is as trained.
        `zero_memory` begins with attended zeros, as Hugging Face and TensorFlow do, instead of an empty memory.

        Raises ConfigError for ids outside the vocabulary and a `memory` of another model or beside `zero_memory`.
        """
        return self.score_batch([text], memory=memory, memory_len=memory_len, zero_memory=zero_memory)[0]

    def score_batch(
        self,
        texts: Sequence[Text],
        *,
        memory: TextMemory | None = None,
        memory_len: int = -1,
        zero_memory: bool = False,
    ) -> list[Tensor]:
        """As `score`, of several texts together."""
        rows = [self._read(text, memory) for text in _several(texts)]
        check_count(memory_len, least=-1, what="memory_len")
        if zero_memory and memory is not None:
            raise ConfigError("zero_memory begins with zeros, and a memory is given. Leave one of them out.")
        if zero_memory and self.bundle.document_border == "mask":
            raise ConfigError("zero_memory is no document, and this model sees its own document only. Leave it out.")
        memory_len = self.bundle.memory_len if memory_len < 0 else memory_len
        scores: list[Tensor] = []
        for start in range(0, len(rows), _MOST_ROWS):
            some = self._score(rows[start : start + _MOST_ROWS], memory_len=memory_len, zero_memory=zero_memory)
            scores += [one.clone() for one in some]  # outside of inference mode, so that others may compute with them
        return scores

    def generate(
        self, prompt: Text, *, memory: TextMemory | None = None, keep_memory: bool = False, **settings: Any
    ) -> Generation:
        """The text that continues a prompt; an empty one begins a document.

        `settings` are those of `SamplingParams`: max_tokens, temperature, top_k, top_p, min_p, seed, stop ... `memory`
        is what was read before the prompt. `keep_memory` gives the memory after the text.

        Raises ConfigError for a setting that is unknown or out of range, ids outside the vocabulary, an empty prompt
        where the model cannot begin a document, a memory of another model.
        """
        _refuse_samples(settings)
        return self.generate_batch([prompt], memory=memory, keep_memory=keep_memory, **settings)[0][0]

    def generate_batch(
        self, prompts: Sequence[Text], *, memory: TextMemory | None = None, keep_memory: bool = False, **settings: Any
    ) -> list[list[Generation]]:
        """As `generate`, of several prompts together: the `num_samples` texts of each."""
        writing = SamplingParams.of(settings)
        begun = [self.prompt(prompt, memory) for prompt in _several(prompts)]
        texts: dict[tuple[int, int], str] = defaultdict(str)
        made: dict[tuple[int, int], Generation] = {}
        for piece in self.write(begun, writing, keep_memory=keep_memory):
            key = piece.prompt, piece.sample
            texts[key] += piece.text
            if piece.ending:
                made[key] = self.generation(texts[key], piece.ending, begun[piece.prompt])
        return [[made[number, sample] for sample in range(writing.num_samples)] for number in range(len(begun))]

    def stream(self, prompt: Text, *, memory: TextMemory | None = None, **settings: Any) -> Iterator[str]:
        """As `generate`, of one prompt: the text in pieces, as they are made."""
        _refuse_samples(settings)
        pieces = self.write([self.prompt(prompt, memory)], SamplingParams.of(settings))
        return (piece.text for piece in pieces if piece.text)

    def write(
        self, prompts: Iterable[Prompt], writing: SamplingParams, *, keep_memory: bool = False
    ) -> Iterator[OutputChunk]:
        """As `generate`, of many prompts, which are read one by one: pieces of all texts as they come."""
        writing.check(vocab_size=self.tokenizer.vocab_size)
        if not self.network.section.scheme.uses_memory and (keep_memory or writing.memory_len > 0):
            raise ConfigError(
                f"a model with {self.network.section.positions} positions remembers nothing. Leave the memory out."
            )
        decoder = self._decoder(writing.memory_len)
        return write(decoder, self.tokenizer, prompts, writing, keeps_memory=keep_memory)

    def writer(self, *, num_rows: int, memory_len: int = -1) -> Scheduler:
        """For prompts that come and go: `num_rows` texts at once, a segment of prompts is read between two tokens."""
        return Scheduler(self._decoder(memory_len), self.tokenizer, num_rows=num_rows, read_len=self.bundle.segment_len)

    def generation(self, text: str, ending: Completion, prompt: Prompt) -> Generation:
        """A whole text, of its pieces, its end and its prompt."""
        ids = [token.id for token in ending.tokens]
        memory = None
        if ending.past is not None:
            memory = TextMemory(ending.past, ids[-1] if ids else prompt.ids[-1], self.fingerprint)
        log_probs, top = [token.log_p for token in ending.tokens], [token.top for token in ending.tokens]
        return Generation(text, ids, ending.finish, log_probs, top, memory)

    def memory(self, text: Text, *, memory: TextMemory | None = None, memory_len: int = -1) -> TextMemory:
        """What is remembered of a text, behind what `memory` has; `memory_len` tokens of it, -1 as in training.

        Raises ConfigError where the model remembers nothing, and as `generate`.
        """
        check_count(memory_len, least=-1, what="memory_len")
        prompt = self.prompt(text, memory)
        past = self._decoder(memory_len).read(Request(ids=prompt.ids, max_tokens=0, past=prompt.past))
        return TextMemory(past, prompt.ids[-1], self.fingerprint)

    def load_memory(self, path: str | Path) -> TextMemory:
        """One that `TextMemory.save` wrote. Raises CheckpointError if it is damaged or of another model."""
        return load_memory(path_of(path), self.network, fingerprint=self.fingerprint)

    def read_memory(self, data: bytes, *, called: str) -> TextMemory:
        """As `load_memory`, of the file's content, which messages call so."""
        return read_memory(data, self.network, fingerprint=self.fingerprint, called=called)

    def empty_memory(
        self, *, num_rows: int, memory_len: int = -1, chunk_len: int = 1, with_documents: bool = False
    ) -> KVCache:
        """What `hidden` begins with: for so many rows, of at most `chunk_len` positions at a time.

        Raises ConfigError for numbers that are none, and for a model without a memory.
        """
        check_count(num_rows, least=1, what="num_rows")
        check_count(memory_len, least=-1, what="memory_len")
        check_count(chunk_len, least=1, what="chunk_len")
        memory_len = self.bundle.memory_len if memory_len < 0 else memory_len
        return self.frozen.ring(
            num_rows=num_rows, memory_len=memory_len, chunk_len=chunk_len, with_documents=with_documents
        )

    def hidden(
        self, inputs: Tensor, memory: KVCache | None = None, *, document_BT: Tensor | None = None
    ) -> tuple[Tensor, KVCache]:
        """(hidden_LBTD, the memory after them): what enters each layer, and what leaves the last one, normed; L + 1.

        `inputs` are tokens_BT (int64) or vectors_BTD in their place, in the model's type. `memory` is changed in place,
        by the keys and values of the inputs; None begins an empty one as long as in training. `document_BT` (int64, >=
        0) confines each position to its own document, so that a new number forgets what a row had; for a memory that
        was made `with_documents`.

        Raises ConfigError for inputs that are neither, for ids outside the vocabulary, and for more positions than the
        memory takes at a time.
        """
        width, dtype = self.network.section.width, self.network.embedding.weight(0).dtype
        what = f"{tuple(inputs.shape)} {inputs.dtype}" if isinstance(inputs, Tensor) else type(inputs).__name__
        is_tokens = isinstance(inputs, Tensor) and inputs.dtype == torch.int64 and inputs.dim() == 2
        is_vectors = isinstance(inputs, Tensor) and inputs.dtype == dtype and inputs.shape[2:] == (width,)
        if not (is_tokens or is_vectors) or not inputs.shape[0] or not inputs.shape[1]:
            raise ConfigError(
                f"inputs of {what}: give a tensor of one row and position or more, int64 tokens [rows, positions], or "
                f"vectors [rows, positions, {width}] of the model's type, {dtype}."
            )
        inputs = inputs.to(self.device)
        num_rows, num_positions = inputs.shape[:2]
        if memory is None:
            memory = self.empty_memory(
                num_rows=num_rows, chunk_len=num_positions, with_documents=document_BT is not None
            )
        if not isinstance(memory, KVCache) or memory.owner is not self.frozen:
            raise ConfigError(
                "this memory is none of this model, as its weights are now, for hidden states. Make it by empty_memory."
            )
        if num_rows != memory.num_rows or num_positions > memory.chunk_len:
            raise ConfigError(
                f"{counted(num_rows, 'row')} of {num_positions} positions: this memory is for "
                f"{counted(memory.num_rows, 'row')} of at most "
                f"{memory.chunk_len} at a time. Cut the inputs, or make another memory."
            )
        if (document_BT is None) != (memory.documents is None):
            raise ConfigError("documents are for a memory that was made with_documents, which needs them each time.")
        if document_BT is not None:
            if (
                not isinstance(document_BT, Tensor)
                or document_BT.dtype != torch.int64
                or document_BT.shape != (num_rows, num_positions)
                or bool((document_BT < 0).any())
            ):
                raise ConfigError(f"document_BT must be int64, 0 or more, {(num_rows, num_positions)}, as the inputs.")
            document_BT = document_BT.to(self.device)
        if is_tokens:
            check_ids(inputs.flatten().tolist(), vocab_size=self.network.vocab_size, what="inputs")
        with torch.inference_mode():
            vectors = self.network.embedding(inputs) if is_tokens else inputs
            hiddens = self.frozen.run_embedded(vectors, memory, document_BT=document_BT)
        return torch.stack(hiddens), memory  # outside of inference mode, so that others may train on them

    def prompt(self, text: Text, memory: TextMemory | None = None) -> Prompt:
        """What a text is for `write` and `generation`: its ids behind a memory; without one, behind an end-of-text,
        where the model can begin a document and the text is not given as ids. Raises as `generate`."""
        prompt, end_of_text = self._read(text, memory), self.tokenizer.end_of_text
        if self.bundle.document_border == "mask" and end_of_text in prompt.ids[1:]:  # nothing before it is seen
            last = len(prompt.ids) - 1 - prompt.ids[::-1].index(end_of_text)
            prompt = prompt._replace(ids=prompt.ids[last:], past=None, num_led=0)
        if not prompt.ids:
            has_mark = self.tokenizer.end_of_text is not None
            why = "was not trained on first tokens" if has_mark else "has no end-of-text in its vocabulary"
            raise ConfigError(f"this model {why} and cannot begin a document. Give a prompt.")
        return prompt

    def _read(self, text: Text, memory: TextMemory | None) -> Prompt:
        if not isinstance(memory, TextMemory | None):
            raise ConfigError(f"{memory!r:.200} is no memory of a text. Make one by `memory` or `generate`.")
        if memory is not None and memory.model != self.fingerprint:
            raise ConfigError("this memory is of another model. Make it with this one, by `memory` or `generate`.")
        vocab_size = self.tokenizer.vocab_size
        ids = self.encode(text) if isinstance(text, str) else check_ids(text, vocab_size=vocab_size, what="the prompt")
        shown, end_of_text = text if isinstance(text, str) else self.tokenizer.decode(ids), self.tokenizer.end_of_text
        led: list[int] = []
        if memory is not None:
            led = [memory.last]
        elif end_of_text is not None and self.bundle.begins_documents and (isinstance(text, str) or not ids):
            led = [end_of_text]
        past = None if memory is None else memory.past
        return Prompt((*led, *ids), past, self.tokenizer.joint(shown), num_led=len(led))

    def window(self, memory_len: int = -1) -> int:
        """Tokens of the past that a text sees: as many as asked for; -1 is no less context than a segment gave in
        training, and no more than the memory where its length is the window."""
        if memory_len >= 0:
            return memory_len
        bundle, has_window = self.bundle, self.network.section.same_length != "off"
        return bundle.memory_len if has_window else max(bundle.memory_len, bundle.segment_len - 1)

    def _decoder(self, memory_len: int) -> Decoder:
        model = self.frozen if self.network.section.scheme.uses_memory else self.network
        return Decoder(model, memory_len=self.window(memory_len), segment_len=self.bundle.segment_len)

    @torch.inference_mode()
    def _score(self, rows: list[Prompt], *, memory_len: int, zero_memory: bool) -> list[Tensor]:
        """Of some texts; those that the ring takes are read together, each padded to the longest."""
        segment_len, lengths = self.bundle.segment_len, [len(row.ids) for row in rows]
        if not self.network.section.scheme.uses_memory or zero_memory:  # whose places may be counted from the end
            plain = partial(log_probabilities, self.network, segment_len=segment_len, memory_len=memory_len)
            texts = [torch.tensor([row.ids], dtype=torch.int64, device=self.device) for row in rows]
            return [plain(one, zero_memory=zero_memory, document_BS=self._documents(one))[0] for one in texts]
        tokens_BS = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
        for tokens_S, row in zip(tokens_BS, rows, strict=True):
            tokens_S[: len(row.ids)] = torch.tensor(row.ids)
        tokens_BS = tokens_BS.to(self.device)
        document_BS = self._documents(tokens_BS)
        longest = max(len(row.ids) + (0 if row.past is None else row.past.document_S.shape[0]) for row in rows)
        memory_len = min(memory_len, longest)  # a longer ring would hold no more
        ring = self.frozen.ring(
            num_rows=len(rows),
            memory_len=memory_len,
            chunk_len=segment_len,
            with_documents=document_BS is not None,
        )
        for index, row in enumerate(rows):
            if row.past is not None:
                ring.put(index, row.past)
        parts = [torch.empty(len(rows), 0, device=self.device)]  # fewer than two tokens have no scores
        for start in range(0, tokens_BS.shape[1] - 1, segment_len):
            stop = min(start + segment_len, tokens_BS.shape[1] - 1)
            document_BT = None if document_BS is None else document_BS[:, start:stop]
            hidden_BTD = self.frozen.run(tokens_BS[:, start:stop], ring, document_BT=document_BT)
            parts.append(-self.frozen.losses(hidden_BTD, tokens_BS[:, start + 1 : stop + 1]))
        log_p_BS = torch.cat(parts, dim=1)
        return [log_p_S[: length - 1] for log_p_S, length in zip(log_p_BS, lengths, strict=True)]

    def _documents(self, tokens_BS: Tensor) -> Tensor | None:
        """As in training with masks: an end-of-text belongs to the document that it opens, what is before it to that of
        the memory, 0. None for a model that was trained without masks, or knows no end-of-text."""
        end_of_text = self.tokenizer.end_of_text
        if self.bundle.document_border != "mask" or end_of_text is None:
            return None
        return (tokens_BS == end_of_text).cumsum(1)


def _several(texts: Iterable[Text]) -> list[Text]:
    """Raises ConfigError for one text, whose characters are not meant."""
    if isinstance(texts, str | bytes | Mapping | Set) or not isinstance(texts, Iterable):
        raise ConfigError(f"{texts!r:.200} is no list of texts. Give a list, also of one.")
    return list(texts)


def _refuse_samples(settings: dict[str, Any]) -> None:
    if settings.get("num_samples", 1) != 1:
        raise ConfigError("this gives one text. Use generate_batch([prompt], num_samples=...) for several.")


_MOST_ROWS = 16
"""Texts that are scored at a time."""
