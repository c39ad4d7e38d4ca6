"""A trained model for use from Python: it scores text, generates text, makes memories and returns hidden states.

import txl_dist

lm = txl_dist.load("bundles/first") # a bundle, a run or a checkpoint lm.score("def load(path):") # log-probability of
each token lm.generate("def load(", max_tokens=40).text memory = lm.memory(a_long_text) # read once ... lm.generate("
and then", memory=memory).text # ... and continued as often as needed
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from txl_dist.config.renamed import warn_of_old_method
from txl_dist.console.formatting import counted
from txl_dist.errors import ConfigError
from txl_dist.inference.bundle import Bundle, require_causal
from txl_dist.inference.generate import Decoder, Request
from txl_dist.inference.kv_cache import FrozenModel, KVCache
from txl_dist.inference.options import SamplingParams, check_count, check_ids, check_text
from txl_dist.inference.probe import log_probabilities
from txl_dist.inference.scheduler import Completion, FinishReason, OutputChunk, Prompt, Scheduler, stream
from txl_dist.inference.text_memory import TextMemory, fingerprint_of, load_memory, read_memory
from txl_dist.io.files import path_of
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.tokenizers.base import Tokenizer

Text = str | Sequence[int]
"""A text as a string, or as the ids of its tokens, which are used unchanged."""


class Generation(NamedTuple):
    """Generated text with its tokens and their log-probabilities, as `LanguageModel.generate` returns it."""

    text: str
    """Generated text, without the prompt."""
    ids: list[int]
    """Ids of the generated tokens. If a stop string ended the text, the tokens end before that string."""
    finish: FinishReason
    """Reason why the text ended: `length` (it has `max_tokens` tokens), `stop` (a stop string) or `end_of_text`."""
    log_probs: list[float]
    """Log-probability of each token in nats. The model gives it before the temperature and other sampling settings
    apply."""
    top: list[list[tuple[int, float]]]
    """Most probable ids at each token's position with their log-probabilities. Empty unless the setting `log_probs`
    requests them."""
    memory: TextMemory | None
    """Memory after the prompt and the text. None unless `keep_memory` was True in the call."""


class LanguageModel:
    """A trained model on its device, which scores and generates text.

    `txl_dist.load` returns this object. It stores no state of texts, so methods take and return memories.
    """

    def __init__(self, bundle: Bundle) -> None:
        """Use the model of an open bundle. Raises ConfigError if the model cannot predict the next token."""
        require_causal(bundle.section, where="the model")
        self.bundle = bundle
        self._versions: list[tuple[int, int]] = []

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer between text and ids."""
        return self.bundle.tokenizer

    @property
    def network(self) -> TransformerXL:
        """Network of the model, in evaluation mode.

        A program can change the network's weights between calls, in place or by `load_state_dict`. The next call uses
        the new weights. It raises ConfigError for a memory that was made with the old weights.
        """
        return self.bundle.model

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.network.embedding.weight(0).device

    @property
    def frozen(self) -> FrozenModel:
        """Model with a KV cache and the current weights. Raises ConfigError for a model without a memory."""
        self._forget_old_weights()
        return self._frozen

    @property
    def fingerprint(self) -> str:
        """Hash (sha256) of the model's settings and weights. The model reads only memories with this fingerprint."""
        self._forget_old_weights()
        return self._fingerprint

    @cached_property
    def _frozen(self) -> FrozenModel:
        return FrozenModel(self.network)

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint_of(self.network)

    def _forget_old_weights(self) -> None:
        """Drop the cached `FrozenModel` and fingerprint if the weights have changed since the last call.

        torch counts the writes to a tensor, and a new count shows a change. A write through `.data` is not counted, so
        such a change is not noticed.
        """
        versions = []
        for parameter in self.network.parameters():
            if parameter.is_inference():
                version = 0
            else:
                version = parameter._version
            versions.append((parameter.data_ptr(), version))
        if versions != self._versions:
            for name in ("_frozen", "_fingerprint"):
                self.__dict__.pop(name, None)
            self._versions = versions

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without an end-of-text token.

        Raises ConfigError if `text` is not a string, and DataError if the vocabulary cannot encode it.
        """
        check_text(text)
        return [int(i) for i in self.tokenizer.encode_prompt(text)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text for a list of ids. Raises ConfigError for an id outside the vocabulary."""
        return self.tokenizer.decode(check_ids(ids, vocab_size=self.tokenizer.vocab_size, what="ids"))

    def score(
        self, text: Text, *, memory: TextMemory | None = None, memory_len: int = -1, zero_memory: bool = False
    ) -> Tensor:
        """Return the log-probability in nats of each token of a text, [tokens], in fp32 or higher.

        With `memory` the first token is scored after the memory's text. Without `memory` the first token of a string is
        scored after an end-of-text token. The first token has no score if `text` is a list of ids and has no `memory`,
        or if the model cannot begin a document.

        If training used document masks, an end-of-text token among the ids begins a document that sees nothing before
        it. `memory_len` is the number of past tokens that a token sees through the memory. It can be larger than in
        training. The value -1 means as many as in training. With `zero_memory` the text begins with a memory of zeros,
        which queries attend to, as in Hugging Face and TensorFlow.

        Raises ConfigError for ids outside the vocabulary, for a `memory` of another model, and for a `memory` together
        with `zero_memory`.
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
        """Score several texts together.

        Returns one tensor per text. The arguments are the arguments of `score`, and apply to every text.
        """
        prompts = [self._read(text, memory) for text in _several(texts)]
        check_count(memory_len, least=-1, what="memory_len")
        if zero_memory and memory is not None:
            raise ConfigError("zero_memory and a memory are both given. Pass only one of the two.")
        if zero_memory and self.bundle.document_mask:
            raise ConfigError(
                "zero_memory cannot be used with this model, which attends only within a document. A memory of zeros "
                "belongs to no document. Remove zero_memory."
            )
        if memory_len < 0:
            memory_len = self.bundle.memory_len
        scores: list[Tensor] = []
        for start in range(0, len(prompts), _MOST_ROWS):
            batch = prompts[start : start + _MOST_ROWS]
            for log_p_S in self._score(batch, memory_len=memory_len, zero_memory=zero_memory):
                scores.append(log_p_S.clone())  # outside inference mode, so that callers may compute with it
        return scores

    def generate(
        self, prompt: Text, *, memory: TextMemory | None = None, keep_memory: bool = False, **settings: Any
    ) -> Generation:
        """Generate the text that continues a prompt. If the prompt is empty, the text is a new document.

        `settings` are fields of `SamplingParams`: max_tokens, temperature, top_k, top_p, min_p, seed, stop ... `memory`
        is the memory of the text before the prompt. With `keep_memory` the result holds the memory after the text.

        Raises ConfigError for an unknown setting, a value out of range, ids outside the vocabulary, or a memory of
        another model. Also raises it for an empty prompt if the model cannot begin a document.
        """
        _refuse_samples(settings)
        return self.generate_batch([prompt], memory=memory, keep_memory=keep_memory, **settings)[0][0]

    def generate_batch(
        self, prompts: Sequence[Text], *, memory: TextMemory | None = None, keep_memory: bool = False, **settings: Any
    ) -> list[list[Generation]]:
        """Generate from several prompts together. Returns a list of `num_samples` generations per prompt.

        The arguments apply to every prompt, and `generate` describes them.
        """
        params = SamplingParams.of(settings)
        encoded = [self.prompt(prompt, memory) for prompt in _several(prompts)]
        texts: dict[tuple[int, int], str] = defaultdict(str)
        generations: dict[tuple[int, int], Generation] = {}
        for chunk in self.stream_batch(encoded, params, keep_memory=keep_memory):
            key = chunk.prompt, chunk.sample
            texts[key] += chunk.text
            if chunk.ending:
                generations[key] = self.generation(texts[key], chunk.ending, encoded[chunk.prompt])
        results: list[list[Generation]] = []
        for number in range(len(encoded)):
            results.append([generations[number, sample] for sample in range(params.num_samples)])
        return results

    def stream(self, prompt: Text, *, memory: TextMemory | None = None, **settings: Any) -> Iterator[str]:
        """Generate from one prompt, and yield each part of the text as soon as it is generated.

        The arguments are the same as for `generate`.
        """
        _refuse_samples(settings)
        chunks = self.stream_batch([self.prompt(prompt, memory)], SamplingParams.of(settings))
        return (chunk.text for chunk in chunks if chunk.text)

    def stream_batch(
        self, prompts: Iterable[Prompt], writing: SamplingParams, *, keep_memory: bool = False
    ) -> Iterator[OutputChunk]:
        """Generate from many prompts, and yield parts of all texts as they are generated.

        The prompts are read one by one. `LanguageModel.prompt` makes the prompts. `writing` holds the sampling
        settings. With `keep_memory` the last chunk of each text has the memory after the text.
        """
        writing.check(vocab_size=self.tokenizer.vocab_size)
        if not self.network.section.scheme.uses_memory and (keep_memory or writing.memory_len > 0):
            raise ConfigError(
                f"a model with {self.network.section.positions} positions has no memory. Remove keep_memory "
                "and memory_len."
            )
        decoder = self._decoder(writing.memory_len)
        return stream(decoder, self.tokenizer, prompts, writing, keeps_memory=keep_memory)

    def write(
        self, prompts: Iterable[Prompt], writing: SamplingParams, *, keep_memory: bool = False
    ) -> Iterator[OutputChunk]:
        """Log a deprecation warning, then do the same as `stream_batch`. Version 0.2 called that method `write`."""
        warn_of_old_method("LanguageModel.write")
        return self.stream_batch(prompts, writing, keep_memory=keep_memory)

    def writer(self, *, num_rows: int, memory_len: int = -1) -> Scheduler:
        """Make a scheduler to which prompts can be added, and from which they can be removed, at any time.

        The scheduler generates `num_rows` texts at once. Between two tokens it reads one segment of the waiting
        prompts. `memory_len` is the number of past tokens that a text sees. The value -1 means as many as in training.
        """
        return Scheduler(self._decoder(memory_len), self.tokenizer, num_rows=num_rows, read_len=self.bundle.segment_len)

    def generation(self, text: str, ending: Completion, prompt: Prompt) -> Generation:
        """Return a `Generation` for a text that `stream_batch` has completed, from its completion and its prompt."""
        ids = [token.id for token in ending.tokens]
        memory = None
        if ending.past is not None:
            if ids:
                last = ids[-1]
            else:
                last = prompt.ids[-1]
            memory = TextMemory(ending.past, last, self.fingerprint)
        log_probs = [token.log_p for token in ending.tokens]
        top = [token.top for token in ending.tokens]
        return Generation(text, ids, ending.finish, log_probs, top, memory)

    def memory(self, text: Text, *, memory: TextMemory | None = None, memory_len: int = -1) -> TextMemory:
        """Read a text and return the memory after it, which `score` and `generate` continue from.

        The text comes after the text of `memory`, if one is given. The result holds the last `memory_len` tokens. The
        value -1 means as many as in training. Raises ConfigError if the model has no memory, and for the same inputs as
        `generate`.
        """
        check_count(memory_len, least=-1, what="memory_len")
        prompt = self.prompt(text, memory)
        past = self._decoder(memory_len).read(Request(ids=prompt.ids, max_tokens=0, past=prompt.past))
        return TextMemory(past, prompt.ids[-1], self.fingerprint)

    def load_memory(self, path: str | Path) -> TextMemory:
        """Load a memory from a file that `TextMemory.save` wrote.

        Raises CheckpointError if the file is damaged, or if another model made the memory.
        """
        return load_memory(path_of(path), self.network, fingerprint=self.fingerprint)

    def read_memory(self, data: bytes, *, called: str) -> TextMemory:
        """Read a memory from the content of its file, as `load_memory` does. Messages name the content `called`."""
        return read_memory(data, self.network, fingerprint=self.fingerprint, called=called)

    def empty_memory(
        self, *, num_rows: int, memory_len: int = -1, chunk_len: int = 1, with_documents: bool = False
    ) -> KVCache:
        """Make an empty memory of `num_rows` texts for `hidden`.

        The method `hidden` then takes at most `chunk_len` positions per call. `memory_len` is the largest number of
        past tokens in the memory. The value -1 means as many as in training. With `with_documents`, `hidden` needs the
        document number of each position. Raises ConfigError for an argument that is not a whole number in its range,
        and for a model without a memory.
        """
        check_count(num_rows, least=1, what="num_rows")
        check_count(memory_len, least=-1, what="memory_len")
        check_count(chunk_len, least=1, what="chunk_len")
        if memory_len < 0:
            memory_len = self.bundle.memory_len
        return self.frozen.ring(
            num_rows=num_rows, memory_len=memory_len, chunk_len=chunk_len, with_documents=with_documents
        )

    def hidden(
        self, inputs: Tensor, memory: KVCache | None = None, *, document_BT: Tensor | None = None
    ) -> tuple[Tensor, KVCache]:
        """Run the model on inputs. Returns (hidden_LBTD, the memory after the inputs): the hidden states of all layers.

        The first axis of hidden_LBTD has the inputs of the L layers, then the normed output of the last layer: L + 1
        entries. `inputs` are tokens_BT (int64), or vectors_BTD in the model's type that replace embeddings. The inputs'
        keys and values are appended to `memory` in place. If `memory` is None, an empty memory is made, as long as in
        training. `document_BT` (int64, >= 0) is the document number of each position. A position then sees only its own
        document. The argument needs a memory that was made `with_documents`.

        Raises ConfigError for inputs that are neither tokens nor vectors, and for ids outside the vocabulary. Also
        raises it for a memory or documents that do not fit, and for more positions than the memory takes per call.
        """
        is_tokens = self._check_inputs(inputs)
        inputs = inputs.to(self.device)
        num_rows, num_positions = inputs.shape[:2]
        if memory is None:
            with_documents = document_BT is not None
            memory = self.empty_memory(num_rows=num_rows, chunk_len=num_positions, with_documents=with_documents)
        self._check_cache(memory, num_rows=num_rows, num_positions=num_positions)
        self._check_documents(document_BT, memory, num_rows=num_rows, num_positions=num_positions)
        if document_BT is not None:
            document_BT = document_BT.to(self.device)
        if is_tokens:
            check_ids(inputs.flatten().tolist(), vocab_size=self.network.vocab_size, what="inputs")
        with torch.inference_mode():
            if is_tokens:
                vectors_BTD = self.network.embedding(inputs)
            else:
                vectors_BTD = inputs
            hiddens_BTD = self.frozen.run_embedded(vectors_BTD, memory, document_BT=document_BT)
        return torch.stack(hiddens_BTD), memory  # outside inference mode, so that callers may train on them

    def _check_inputs(self, inputs: Tensor) -> bool:
        """Return True if the inputs of `hidden` are tokens, False if they are vectors.

        Raises ConfigError for other inputs.
        """
        width = self.network.section.width
        dtype = self.network.embedding.weight(0).dtype
        what = type(inputs).__name__
        if isinstance(inputs, Tensor):
            what = f"{tuple(inputs.shape)} {inputs.dtype}"
            is_tokens = inputs.dtype == torch.int64 and inputs.dim() == 2
            is_vectors = inputs.dtype == dtype and inputs.shape[2:] == (width,)
            if (is_tokens or is_vectors) and inputs.shape[0] and inputs.shape[1]:
                return is_tokens
        raise ConfigError(
            f"the inputs are {what}. Give a tensor with at least one row and one position: either int64 tokens of "
            f"shape [rows, positions], or {dtype} vectors of shape [rows, positions, {width}]."
        )

    def _check_cache(self, memory: KVCache, *, num_rows: int, num_positions: int) -> None:
        """Raise ConfigError if a memory belongs to another model, or does not take inputs of this size."""
        if not isinstance(memory, KVCache) or memory.owner is not self.frozen:
            raise ConfigError(
                "this memory belongs to another model or to earlier weights of this model, or was not made by "
                "empty_memory. Make a new memory with this model's empty_memory."
            )
        if num_rows != memory.num_rows or num_positions > memory.chunk_len:
            raise ConfigError(
                f"the inputs have {counted(num_rows, 'row')} of {num_positions} positions, but this memory is for "
                f"{counted(memory.num_rows, 'row')} of at most "
                f"{memory.chunk_len} positions per call. Pass inputs of this size, or make a memory for your "
                "inputs: empty_memory(num_rows=..., chunk_len=...)."
            )

    def _check_documents(
        self, document_BT: Tensor | None, memory: KVCache, *, num_rows: int, num_positions: int
    ) -> None:
        """Raise ConfigError if document numbers do not fit the memory and the inputs of `hidden`."""
        if (document_BT is None) != (memory.documents is None):
            raise ConfigError(
                "document_BT does not fit the memory. If the memory was made with with_documents=True, pass "
                "document_BT in each call. If the memory was made without with_documents, do not pass document_BT."
            )
        if document_BT is None:
            return
        shape = (num_rows, num_positions)
        is_int64 = isinstance(document_BT, Tensor) and document_BT.dtype == torch.int64
        if not is_int64 or document_BT.shape != shape or bool((document_BT < 0).any()):
            raise ConfigError(
                f"document_BT must be an int64 tensor of shape {shape}, like the inputs, with values of 0 or more."
            )

    def prompt(self, text: Text, memory: TextMemory | None = None) -> Prompt:
        """Encode a text as the prompt that `stream_batch` and `generation` take.

        With a `memory`, the ids begin with the memory's last token. Without a memory, the ids begin with an end-of-text
        token if the model can begin a document and the text is a string. Raises the same errors as `generate`.
        """
        prompt = self._read(text, memory)
        end_of_text = self.tokenizer.end_of_text
        if self.bundle.document_mask and end_of_text in prompt.ids[1:]:  # nothing before it is seen
            last = len(prompt.ids) - 1 - prompt.ids[::-1].index(end_of_text)
            prompt = prompt._replace(ids=prompt.ids[last:], past=None, num_led=0)
        if not prompt.ids:
            has_mark = self.tokenizer.end_of_text is not None
            if has_mark:
                why = "was not trained on the first tokens of documents"
            else:
                why = "has no end-of-text token"
            raise ConfigError(
                f"the prompt is empty, but this model {why}, and therefore cannot begin a document. Give a prompt."
            )
        return prompt

    def _read(self, text: Text, memory: TextMemory | None) -> Prompt:
        """Encode a text that follows a memory or an end-of-text token. The result can have no ids.

        Raises ConfigError for a memory of another model, and for a text that cannot be encoded.
        """
        if not isinstance(memory, TextMemory | None):
            raise ConfigError(
                f"{memory!r:.200} is not a memory of a text. Pass a result of the method `memory`, or the memory that "
                "`generate` returns with keep_memory=True."
            )
        if memory is not None and memory.model != self.fingerprint:
            raise ConfigError(
                "this memory belongs to another model. Make a new memory with this model: call the method `memory`, or "
                "`generate` with keep_memory=True."
            )
        if isinstance(text, str):
            ids = self.encode(text)
            decoded = text
        else:
            ids = check_ids(text, vocab_size=self.tokenizer.vocab_size, what="the prompt")
            decoded = self.tokenizer.decode(ids)
        end_of_text = self.tokenizer.end_of_text
        can_begin = end_of_text is not None and self.bundle.begins_documents
        leading_ids: list[int] = []
        if memory is not None:
            leading_ids = [memory.last]
        elif end_of_text is not None and can_begin and (isinstance(text, str) or not ids):
            leading_ids = [end_of_text]
        if memory is None:
            past = None
        else:
            past = memory.past
        joint = self.tokenizer.joint(decoded)
        return Prompt((*leading_ids, *ids), past, joint, num_led=len(leading_ids))

    def window(self, memory_len: int = -1) -> int:
        """Return the number of past tokens that a text sees, for an argument `memory_len`.

        For -1 the result is the length of the memory in training. If the model does not use `same_length`, the result
        for -1 is at least the segment length minus 1, because the last token of a training segment saw that many
        earlier tokens.
        """
        if memory_len >= 0:
            return memory_len
        bundle = self.bundle
        if self.network.section.same_length != "off":
            return bundle.memory_len
        return max(bundle.memory_len, bundle.segment_len - 1)

    def _decoder(self, memory_len: int) -> Decoder:
        model = self.frozen if self.network.section.scheme.uses_memory else self.network
        return Decoder(model, memory_len=self.window(memory_len), segment_len=self.bundle.segment_len)

    @torch.inference_mode()
    def _score(self, rows: list[Prompt], *, memory_len: int, zero_memory: bool) -> list[Tensor]:
        """Score several texts. They run together on the KV cache, padded to the longest text. If the cache cannot be
        used, each text runs alone."""
        # Without relative positions padding would move a text: its positions may be counted from the end.
        if not self.network.section.scheme.uses_memory or zero_memory:
            return [self._score_alone(row, memory_len=memory_len, zero_memory=zero_memory) for row in rows]
        segment_len = self.bundle.segment_len
        lengths = [len(row.ids) for row in rows]
        tokens_BS = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
        for tokens_S, row in zip(tokens_BS, rows, strict=True):
            tokens_S[: len(row.ids)] = torch.tensor(row.ids)
        tokens_BS = tokens_BS.to(self.device)
        document_BS = self._documents(tokens_BS)
        past_lens = [0 if row.past is None else row.past.document_S.shape[0] for row in rows]
        longest = max(length + past_len for length, past_len in zip(lengths, past_lens, strict=True))
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
            if document_BS is None:
                document_BT = None
            else:
                document_BT = document_BS[:, start:stop]
            hidden_BTD = self.frozen.run(tokens_BS[:, start:stop], ring, document_BT=document_BT)
            parts.append(-self.frozen.losses(hidden_BTD, tokens_BS[:, start + 1 : stop + 1]))
        log_p_BS = torch.cat(parts, dim=1)
        return [log_p_S[: length - 1] for log_p_S, length in zip(log_p_BS, lengths, strict=True)]

    def _score_alone(self, row: Prompt, *, memory_len: int, zero_memory: bool) -> Tensor:
        """Score one text with the network, without a KV cache."""
        tokens_1S = torch.tensor([row.ids], dtype=torch.int64, device=self.device)
        log_p_1S = log_probabilities(
            self.network,
            tokens_1S,
            segment_len=self.bundle.segment_len,
            memory_len=memory_len,
            zero_memory=zero_memory,
            document_BS=self._documents(tokens_1S),
        )
        return log_p_1S[0]

    def _documents(self, tokens_BS: Tensor) -> Tensor | None:
        """Return the document number of each token, as training with document masks numbers them.

        An end-of-text token belongs to the document that it begins. Tokens before the first end-of-text token belong to
        document 0, and so does the memory. Returns None if the model was trained without masks or has no end-of-text
        token.
        """
        end_of_text = self.tokenizer.end_of_text
        if not self.bundle.document_mask or end_of_text is None:
            return None
        return (tokens_BS == end_of_text).cumsum(1)


def _several(texts: Iterable[Text]) -> list[Text]:
    """Return the texts as a list. Raises ConfigError for a string, which is one text and not several."""
    if isinstance(texts, str | bytes | Mapping | Set) or not isinstance(texts, Iterable):
        raise ConfigError(f"{texts!r:.200} is not a list of texts. Give a list, even for a single text.")
    return list(texts)


def _refuse_samples(settings: dict[str, Any]) -> None:
    """Raise ConfigError if `num_samples` in the settings asks for several texts per prompt."""
    if settings.get("num_samples", 1) != 1:
        raise ConfigError(
            "this method returns one text. To get several texts, call generate_batch([prompt], num_samples=...)."
        )


_MOST_ROWS = 16
"""Number of texts that are scored at a time."""
