"""Tokenizers that others made, with their ids renumbered: a Hugging Face tokenizer.json, a sentencepiece .model.

Their own library encodes and decodes; here lies only the permutation between their ids and ours, which are in order
of frequency in the training split (adaptive softmax cuts the vocabulary at ids). Our file is self-contained: it
holds the foreign file as it was and the foreign id of each of ours, -1 for an end-of-text that had to be added.

Special tokens are never made from text: none is put around it, and their spelling in a text is encoded as text,
where necessary in two halves, each by itself. Truncation, padding and dropout are switched off.

What they give up: bounded memory (a text is encoded whole, at some hundred bytes per token, but where it can be
shown that cutting it changes no id); and a stream that equals `decode` where ids make bytes that are no UTF-8.
"""

from __future__ import annotations

import base64
import json
import re
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
from typing_extensions import override

from txl_dist.errors import DataError, translate_errors
from txl_dist.io.files import parse_object
from txl_dist.tokenizers.base import END_OF_TEXT, REFUSED, Ids, StreamDecoder, Tokenizer, byte_symbols
from txl_dist.tokenizers.subwords import PIECE_LEN, LibraryTokenizer

ADDED = -1
"""Stands for the foreign id of an end-of-text that the foreign vocabulary does not have."""
_BETWEEN_WORDS = re.compile(r"[A-Za-z](?= [A-Za-z])")
_LOCAL_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"}
_LOCAL_SPLITTERS = {"ByteLevel", "Split", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Digits", "Punctuation"}


class ForeignTokenizer(Tokenizer):
    """What both kinds share: the permutation. `content` is the foreign file as text, `foreign_ids` in our order."""

    def __init__(self, content: str, *, foreign_ids: Sequence[int], end_of_text: int) -> None:
        self.content = content
        self._library, known = self._open(content)
        symbols = [END_OF_TEXT if i == ADDED else known[i] for i in foreign_ids]
        super().__init__(symbols, end_of_text=end_of_text)
        if sorted({*foreign_ids} - {ADDED}) != sorted(known) or len({*foreign_ids}) != len(foreign_ids):
            raise ValueError("foreign_ids do not name every foreign id exactly once")
        if end_of_text < 0 or symbols[end_of_text] != END_OF_TEXT:
            raise ValueError(f"id {end_of_text} is not {END_OF_TEXT}")
        self.foreign_ids = np.array(foreign_ids, dtype=np.int32)
        self._ranks = np.full(max(known) + 1, REFUSED, dtype=np.int32)
        for i, foreign in enumerate(foreign_ids):
            if foreign != ADDED:
                self._ranks[foreign] = i
        unknown = self._unknown()
        if unknown in known and unknown != foreign_ids[end_of_text]:
            self.unknown_id = int(self._ranks[unknown])
        special = (self._special() - {unknown} | {foreign_ids[end_of_text]}) - {ADDED}
        self._is_forbidden = np.isin(np.arange(len(self._ranks)), sorted(special))
        longest_first = sorted({known[i] for i in special}, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @classmethod
    def in_foreign_order(cls, content: str) -> Self:
        """With the ids as they come, an end-of-text behind them where there is none. Raises as `from_values` does."""
        known = cls._open(content)[1]
        ids = sorted(known)
        found = next((i for i in ids if known[i] == END_OF_TEXT), ADDED)
        ids += [ADDED] if found == ADDED else []
        return cls(content, foreign_ids=ids, end_of_text=ids.index(found))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, as the foreign library has it, each document by itself."""
        text = ""
        held: list[int] = []
        for i in ids:
            if i == self.end_of_text:
                text += self._decode(held) + END_OF_TEXT
                held = []
            else:
                held.append(i)
        return text + self._decode(held)

    @override
    def decoder(self, *, after: Sequence[int] = ()) -> StreamDecoder:
        return _NeighbourDecoder(self, after)

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Self:
        """The tokenizer of the values in its file. Raises ValueError or KeyError if they contradict themselves."""
        return cls(values["content"], foreign_ids=values["foreign_ids"], end_of_text=values["end_of_text"])

    def _values(self) -> dict[str, Any]:
        return {"content": self.content, "foreign_ids": self.foreign_ids.tolist()}

    def _ours(self, text: str, foreign: Ids) -> Ids:
        """Our ids of a text, given its foreign ids; encoded once more where it spells a special token."""
        if self._is_forbidden[foreign].any():
            middles = [(match.start() + match.end()) // 2 for match in self._spelled.finditer(text)]
            ends = [*middles, len(text)]
            halves = [text[first:last] for first, last in zip([0, *middles], ends, strict=True)]
            foreign = np.concatenate([self._encode(half) for half in halves])
            if (found := self._is_forbidden[foreign]).any():
                symbol = self.symbols[self._ranks[foreign[found.argmax()]]]
                raise DataError(
                    f"this tokenizer makes its special token {symbol!r} out of ordinary text, {text[:60]!r} ... "
                    "Use another one, or train one here."
                )
        ids: Ids = self._ranks[foreign]
        return ids

    @staticmethod
    @abstractmethod
    def _open(content: str) -> tuple[Any, dict[int, str]]:
        """The library's object and the symbol of each foreign id. Raises ValueError if it is no such file."""

    @abstractmethod
    def _special(self) -> set[int]:
        """Foreign ids that no text may become, but for the one of what is unknown."""

    @abstractmethod
    def _unknown(self) -> int | None:
        """Foreign id of what is unknown."""

    @abstractmethod
    def _encode(self, text: str) -> Ids:
        """Foreign ids of one text."""

    @abstractmethod
    def _decode(self, ids: Sequence[int]) -> str:
        """Text of our ids, without end-of-text among them."""


class HuggingFaceTokenizer(LibraryTokenizer, ForeignTokenizer):
    """Any pipeline of the library `tokenizers`; `content` is the text of its tokenizer.json."""

    kind = "huggingface"

    def __init__(self, content: str, *, foreign_ids: Sequence[int], end_of_text: int) -> None:
        super().__init__(content, foreign_ids=foreign_ids, end_of_text=end_of_text)
        pipeline = parse_object(content)
        self._can_be_cut = _can_be_cut(pipeline, self._library)
        self._is_byte_level = _is_byte_level(pipeline, self._library)

    @property
    def is_lossless(self) -> bool:
        """If it is GPT-2's kind, byte-level BPE."""
        return self._is_byte_level

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """All pieces of all texts in few calls of the library."""
        return [self._ours(text, foreign) for text, foreign in zip(texts, super().encode_batch(texts), strict=True)]

    @staticmethod
    def _open(content: str) -> tuple[Any, dict[int, str]]:
        from tokenizers import Tokenizer as Library

        try:
            library = Library.from_str(content)
        except Exception as error:  # the library raises nothing more particular
            raise ValueError(f"the library tokenizers does not read it: {error}") from error
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True  # as any other text
        if getattr(library.model, "dropout", None) is not None:
            library.model.dropout = None
        return library, {i: symbol for symbol, i in library.get_vocab(with_added_tokens=True).items()}

    def _special(self) -> set[int]:
        return {i for i, token in self._library.get_added_tokens_decoder().items() if token.special}

    def _unknown(self) -> int | None:
        model = parse_object(self.content)["model"]
        name, found = model.get("unk_token"), model.get("unk_id")
        found = self._library.token_to_id(name) if isinstance(name, str) else found
        return None if found is None else int(found)

    def _cut(self, text: str) -> list[str]:
        pieces: list[str] = []
        start = 0
        while self._can_be_cut and (match := _BETWEEN_WORDS.search(text, start + PIECE_LEN)):
            pieces.append(text[start : match.end()])
            start = match.end()
        return [*pieces, text[start:]]

    def _encode(self, text: str) -> Ids:
        return super().encode_batch([text])[0]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._library.decode(self.foreign_ids[list(ids)].tolist(), skip_special_tokens=False))


class SentencePieceTokenizer(ForeignTokenizer):
    """A model of the library `sentencepiece`; `content` is the .model file in base64."""

    kind = "sentencepiece"

    def encode(self, text: str) -> Ids:
        """Ids of the text, encoded whole."""
        return self._ours(text, self._encode(text))

    @staticmethod
    def _open(content: str) -> tuple[Any, dict[int, str]]:
        what = "this tokenizer is a sentencepiece model, which needs the package sentencepiece"
        with translate_errors(DataError, what, "Run `pip install sentencepiece`.", of=(ImportError,)):
            from sentencepiece import SentencePieceProcessor
        library = SentencePieceProcessor()
        try:
            library.LoadFromSerializedProto(base64.b64decode(content, validate=True))
        except RuntimeError as error:
            raise ValueError(f"the library sentencepiece does not read it: {error}") from error
        return library, {i: library.id_to_piece(i) for i in range(library.vocab_size())}

    def _special(self) -> set[int]:
        return {i for i in range(self._library.vocab_size()) if self._library.is_control(i)}

    def _unknown(self) -> int | None:
        return int(self._library.unk_id())

    def _encode(self, text: str) -> Ids:
        return np.array(self._library.encode(text, out_type=int, add_bos=False, add_eos=False), dtype=np.int32)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._library.decode(self.foreign_ids[list(ids)].tolist()))


def _can_be_cut(pipeline: dict[str, Any], library: Any) -> bool:
    """Whether a text may be cut before a blank between two Latin letters without another id.

    So it is if the normaliser works in place, the splitter into words always splits there, as it does in samples,
    and sees nothing beyond (no look-behind, no look-ahead but for blanks), and no added token reaches across.
    """
    splitters, normalizers = _stages(pipeline.get("pre_tokenizer")), _stages(pipeline.get("normalizer"))
    patterns = json.dumps(pipeline.get("pre_tokenizer")).replace("(?!\\\\S)", "")
    added = library.get_added_tokens_decoder().values()
    reaches = any(token.rstrip or _BETWEEN_WORDS.search(token.content) for token in added)
    if not splitters or not set(splitters) <= _LOCAL_SPLITTERS or not set(normalizers) <= _LOCAL_NORMALIZERS:
        return False
    if reaches or any(mark in patterns for mark in ("(?<", "(?=", "(?!", "$", "\\\\b", "\\\\z")):
        return False
    words = [library.pre_tokenizer.pre_tokenize_str(sample) for sample in ("ab cd", "AB CD", "aB Cd", "Ab cD")]
    return not any(first < 2 < last for sample in words for _, (first, last) in sample)


def _is_byte_level(pipeline: dict[str, Any], library: Any) -> bool:
    """Whether it is byte-level BPE as in GPT-2: the bytes of the text as they are, all of which are symbols."""
    model, splitter = pipeline["model"], pipeline.get("pre_tokenizer") or {}
    return bool(
        pipeline.get("normalizer") is None
        and (splitter.get("type"), splitter.get("add_prefix_space")) == ("ByteLevel", False)
        and (pipeline.get("decoder") or {}).get("type") == "ByteLevel"
        and type(library.model).__name__ == "BPE"  # the file need not name the type
        and not any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix"))
        and set(byte_symbols()) <= model["vocab"].keys()
        and all(token.special for token in library.get_added_tokens_decoder().values())
    )


def _stages(stage: dict[str, Any] | None) -> list[str]:
    """Names of the stages of a normalizer or pre_tokenizer, which may be a sequence of them."""
    if stage is None:
        return []
    kind = str(stage.get("type"))
    if kind == "Sequence":
        inner = stage.get("pretokenizers", stage.get("normalizers", []))
        return [name for each in inner for name in _stages(each)]
    return [kind]


class _NeighbourDecoder:
    """Of ids whose text depends on those before them: the first `shown` of what is held are out. A piece that ends in
    half a character is held back until the rest is there."""

    def __init__(self, tokenizer: ForeignTokenizer, after: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        last = max((place for place, i in enumerate(after) if i == tokenizer.end_of_text), default=-1)
        self._held = list(after[last + 1 :])
        self._shown = len(self._held)

    def push(self, i: int) -> str:
        if i == self._tokenizer.end_of_text:
            rest = self.close()
            self._held, self._shown = [], 0
            return rest + END_OF_TEXT
        self._held.append(i)
        now, new = self._tokenizer.decode(self._held), self.close()
        if not new or now.endswith("\ufffd"):
            return ""
        self._held, self._shown = self._held[self._shown :], len(self._held) - self._shown
        return new

    def close(self) -> str:
        decode = self._tokenizer.decode
        return decode(self._held)[len(decode(self._held[: self._shown])) :]
