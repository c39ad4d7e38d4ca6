"""Tokenizers of other programs, with their ids renumbered: a Hugging Face tokenizer.json, a sentencepiece .model.

The program's own library encodes and decodes. This module converts between the ids of the library and our ids. Our ids
are in order of frequency in the training split, because adaptive softmax cuts the vocabulary at ids. Our file is
self-contained: it contains the foreign file unchanged, and the foreign id of each of our ids (-1 for an added
end-of-text). A foreign vocabulary that has a token for the end of a document (`ENDS_OF_DOCUMENT`) keeps that token.

Text is never encoded to special tokens. No special token is added around a text. The spelling of a special token in a
text is encoded as text, in two separate halves if necessary. Truncation, padding and dropout are switched off.

Limitations: memory is not bounded. A text is encoded as a whole, with some hundred bytes per token, unless it has
places where a cut provably changes no id. Streamed text can differ from `decode` where bytes are not UTF-8.
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

ENDS_OF_DOCUMENT = (END_OF_TEXT, "<eod>", "<|end_of_text|>")
"""Tokens that end a document: GPT-2's, XLNet's, Llama 3's. The first one in a foreign vocabulary is our end-of-text."""
ADDED = -1
"""Value in place of the foreign id, if end-of-text was added because the foreign vocabulary does not have it."""
_BETWEEN_WORDS = re.compile(r"[A-Za-z](?= [A-Za-z])")
"""Pattern of a place where a text may be cut: after a Latin letter, if a blank and another Latin letter follow."""
_LOCAL_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"}
_LOCAL_SPLITTERS = {"ByteLevel", "Split", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Digits", "Punctuation"}


class ForeignTokenizer(Tokenizer):
    """Base class of tokenizers of other programs: converts between the ids of the other program and our ids.

    `content` is the other program's file as text. `foreign_ids` has the other program's id for each of our ids. Our ids
    are in order of frequency in the training split.
    """

    def __init__(self, content: str, *, foreign_ids: Sequence[int], end_of_text: int) -> None:
        self.content = content
        self._library, foreign_symbols = self._open(content)
        symbols = [END_OF_TEXT if i == ADDED else foreign_symbols[i] for i in foreign_ids]
        super().__init__(symbols, end_of_text=end_of_text)
        distinct = set(foreign_ids)
        if sorted(distinct - {ADDED}) != sorted(foreign_symbols) or len(distinct) != len(foreign_ids):
            raise ValueError("the list foreign_ids does not contain every id of the other program exactly once")
        if end_of_text < 0 or symbols[end_of_text] not in ENDS_OF_DOCUMENT:
            raise ValueError(
                f"the symbol of id {end_of_text} is not an end-of-text token ({', '.join(ENDS_OF_DOCUMENT)})"
            )
        self.foreign_ids = np.array(foreign_ids, dtype=np.int32)
        self._our_ids = np.full(max(foreign_symbols) + 1, REFUSED, dtype=np.int32)  # by foreign id
        for i, foreign_id in enumerate(foreign_ids):
            if foreign_id != ADDED:
                self._our_ids[foreign_id] = i
        unknown = self._unknown()
        if unknown in foreign_symbols and unknown != foreign_ids[end_of_text]:
            self.unknown_id = int(self._our_ids[unknown])
        special = self._special() - {unknown}
        special.add(foreign_ids[end_of_text])
        special.discard(ADDED)
        self._is_forbidden = np.isin(np.arange(len(self._our_ids)), sorted(special))
        spellings = sorted({foreign_symbols[i] for i in special}, key=len, reverse=True)
        matches_nothing = "(?!)"
        self._special_pattern = re.compile("|".join(map(re.escape, spellings)) or matches_nothing)

    @classmethod
    def in_foreign_order(cls, content: str) -> Self:
        """Build a tokenizer whose ids have the same order as in the other program.

        A missing end-of-text token is added as the last id. Raises ValueError if the content is not a file of this
        kind.
        """
        foreign_symbols = cls._open(content)[1]
        ids = sorted(foreign_symbols)
        symbols = [foreign_symbols[i] for i in ids]
        for symbol in ENDS_OF_DOCUMENT:
            if symbol in symbols:
                return cls(content, foreign_ids=ids, end_of_text=symbols.index(symbol))
        return cls(content, foreign_ids=[*ids, ADDED], end_of_text=len(ids))

    @property
    def has_foreign_ids(self) -> bool:
        """Whether every id is the other program's id of the same token, and no end-of-text was added."""
        return bool((self.foreign_ids == np.arange(self.vocab_size)).all())

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids. The foreign library decodes each document separately."""
        assert self.end_of_text is not None
        text = ""
        document: list[int] = []
        for i in ids:
            if i == self.end_of_text:
                text += self._decode(document) + self.symbols[self.end_of_text]
                document = []
            else:
                document.append(i)
        return text + self._decode(document)

    @override
    def decoder(self, *, after: Sequence[int] = ()) -> StreamDecoder:
        return _NeighbourDecoder(self, after)

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Self:
        """Build a tokenizer from the values in its file. Raises ValueError or KeyError if they are inconsistent."""
        return cls(values["content"], foreign_ids=values["foreign_ids"], end_of_text=values["end_of_text"])

    def _values(self) -> dict[str, Any]:
        return {"content": self.content, "foreign_ids": self.foreign_ids.tolist()}

    def _renumber(self, text: str, foreign_ids: Ids) -> Ids:
        """Convert the other program's ids of a text to our ids. A text that spells a special token is encoded again.

        Raises DataError if the new ids contain a special token too.
        """
        if self._is_forbidden[foreign_ids].any():
            foreign_ids = self._encode_without_special(text)
            is_forbidden = self._is_forbidden[foreign_ids]
            if is_forbidden.any():
                symbol = self.symbols[self._our_ids[foreign_ids[is_forbidden.argmax()]]]
                raise DataError(
                    f"this tokenizer encodes ordinary text to its special token {symbol!r}: {text[:60]!r} ... "
                    "Use another tokenizer, or train one with `txl prepare --tokenizer bpe`."
                )
        ids: Ids = self._our_ids[foreign_ids]
        return ids

    def _encode_without_special(self, text: str) -> Ids:
        """Return the other program's ids of a text, which is cut in the middle of each special token that it spells."""
        parts = []
        start = 0
        for match in self._special_pattern.finditer(text):
            middle = (match.start() + match.end()) // 2
            parts.append(text[start:middle])
            start = middle
        parts.append(text[start:])
        return np.concatenate([self._encode(part) for part in parts])

    @staticmethod
    @abstractmethod
    def _open(content: str) -> tuple[Any, dict[int, str]]:
        """Return (the library's tokenizer, symbol of each id of the other program). Raises ValueError for a file of
        another kind."""

    @abstractmethod
    def _special(self) -> set[int]:
        """Return the other program's ids of special tokens, which no text may be encoded to.

        The id of unknown symbols can be among them.
        """

    @abstractmethod
    def _unknown(self) -> int | None:
        """Return the other program's id of unknown symbols, or None if there is no such id."""

    @abstractmethod
    def _encode(self, text: str) -> Ids:
        """Return the other program's ids of one text."""

    @abstractmethod
    def _decode(self, ids: Sequence[int]) -> str:
        """Return the text of our ids, which do not include end-of-text."""


class HuggingFaceTokenizer(LibraryTokenizer, ForeignTokenizer):
    """Tokenizer that Hugging Face's library `tokenizers` runs. `content` is the text of its tokenizer.json."""

    kind = "huggingface"

    def __init__(self, content: str, *, foreign_ids: Sequence[int], end_of_text: int) -> None:
        super().__init__(content, foreign_ids=foreign_ids, end_of_text=end_of_text)
        pipeline = parse_object(content)
        self._can_be_cut = _can_be_cut(pipeline, self._library)
        self._is_byte_level = _is_byte_level(pipeline, self._library)

    @property
    def is_lossless(self) -> bool:
        """Whether decoding is known to restore the bytes of every text. True only for byte-level BPE as in GPT-2."""
        return self._is_byte_level

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return our ids of each text. The library encodes the pieces of all texts in few calls."""
        batch = super().encode_batch(texts)
        return [self._renumber(text, foreign_ids) for text, foreign_ids in zip(texts, batch, strict=True)]

    @staticmethod
    def _open(content: str) -> tuple[Any, dict[int, str]]:
        from tokenizers import Tokenizer as Library

        try:
            library = Library.from_str(content)
        except Exception as error:  # the library raises nothing more particular
            raise ValueError(f"the library `tokenizers` cannot read the content: {error}") from error
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True  # their spelling is encoded like any other text
        if getattr(library.model, "dropout", None) is not None:
            library.model.dropout = None
        return library, {i: symbol for symbol, i in library.get_vocab(with_added_tokens=True).items()}

    def _special(self) -> set[int]:
        return {i for i, token in self._library.get_added_tokens_decoder().items() if token.special}

    def _unknown(self) -> int | None:
        model = parse_object(self.content)["model"]
        name = model.get("unk_token")
        unknown = model.get("unk_id")
        if isinstance(name, str):
            unknown = self._library.token_to_id(name)
        if unknown is None:
            return None
        return int(unknown)

    def _cut(self, text: str) -> list[str]:
        if not self._can_be_cut:
            return [text]
        pieces: list[str] = []
        start = 0
        while match := _BETWEEN_WORDS.search(text, start + PIECE_LEN):
            pieces.append(text[start : match.end()])
            start = match.end()
        pieces.append(text[start:])
        return pieces

    def _encode(self, text: str) -> Ids:
        return super().encode_batch([text])[0]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._library.decode(self.foreign_ids[list(ids)].tolist(), skip_special_tokens=False))


class SentencePieceTokenizer(ForeignTokenizer):
    """Tokenizer that the library `sentencepiece` runs. `content` is its .model file in base64."""

    kind = "sentencepiece"

    def encode(self, text: str) -> Ids:
        """Return our ids of the text, which is encoded as a whole."""
        return self._renumber(text, self._encode(text))

    @staticmethod
    def _open(content: str) -> tuple[Any, dict[int, str]]:
        what = "this tokenizer is a sentencepiece model, which needs the package sentencepiece"
        with translate_errors(DataError, what, "Run `pip install sentencepiece`.", of=(ImportError,)):
            from sentencepiece import SentencePieceProcessor
        library = SentencePieceProcessor()
        try:
            library.LoadFromSerializedProto(base64.b64decode(content, validate=True))
        except RuntimeError as error:
            raise ValueError(f"the library `sentencepiece` cannot read the content: {error}") from error
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
    """Return whether a text may be cut before a blank between two Latin letters without changing any id.

    The result is True if four conditions hold. Normalizers only change characters in place (for example to lower case).
    Splitters into words always split sample texts at such a blank. The patterns of splitters do not look beyond the
    match (no look-behind, and no look-ahead except for blanks). No added token extends across such a blank.
    """
    splitters = set(_stages(pipeline.get("pre_tokenizer")))
    normalizers = set(_stages(pipeline.get("normalizer")))
    if not splitters or not splitters <= _LOCAL_SPLITTERS or not normalizers <= _LOCAL_NORMALIZERS:
        return False
    for token in library.get_added_tokens_decoder().values():
        if token.rstrip or _BETWEEN_WORDS.search(token.content):
            return False
    patterns = json.dumps(pipeline.get("pre_tokenizer")).replace("(?!\\\\S)", "")
    if any(mark in patterns for mark in ("(?<", "(?=", "(?!", "$", "\\\\b", "\\\\z")):
        return False
    for sample in ("ab cd", "AB CD", "aB Cd", "Ab cD"):
        for _, (start, end) in library.pre_tokenizer.pre_tokenize_str(sample):
            if start < 2 < end:
                return False
    return True


def _is_byte_level(pipeline: dict[str, Any], library: Any) -> bool:
    """Return whether a pipeline is byte-level BPE as in GPT-2.

    Such a pipeline leaves the bytes of a text unchanged and has a symbol for each byte.
    """
    model = pipeline["model"]
    splitter = pipeline.get("pre_tokenizer") or {}
    decoder = pipeline.get("decoder") or {}
    if pipeline.get("normalizer") is not None:
        return False
    if splitter.get("type") != "ByteLevel" or splitter.get("add_prefix_space") is not False:
        return False
    if decoder.get("type") != "ByteLevel":
        return False
    if type(library.model).__name__ != "BPE":  # from the library, because the file need not name the type
        return False
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    if not set(byte_symbols()) <= model["vocab"].keys():
        return False
    return all(token.special for token in library.get_added_tokens_decoder().values())


def _stages(stage: dict[str, Any] | None) -> list[str]:
    """Return the names of all stages of a normalizer or pre_tokenizer, including the stages of nested sequences."""
    if stage is None:
        return []
    kind = str(stage.get("type"))
    if kind != "Sequence":
        return [kind]
    names = []
    for inner_stage in stage.get("pretokenizers", stage.get("normalizers", [])):
        names += _stages(inner_stage)
    return names


class _NeighbourDecoder:
    """Stream decoder of ids whose text depends on the ids before them.

    It keeps the ids of the previous piece of text, which was already returned, and of the current piece. `_num_shown`
    is the number of ids of the previous piece. A piece that ends in half a character is held back until the rest of the
    character is decoded.
    """

    def __init__(self, tokenizer: ForeignTokenizer, after: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        for i in after:
            if i == tokenizer.end_of_text:
                self._ids = []
            else:
                self._ids.append(i)
        self._num_shown = len(self._ids)

    def push(self, i: int) -> str:
        if i == self._tokenizer.end_of_text:
            last_piece = self.close()
            self._ids = []
            self._num_shown = 0
            return last_piece + self._tokenizer.symbols[i]
        self._ids.append(i)
        text = self._tokenizer.decode(self._ids)
        new = self.close()
        if not new or text.endswith("\ufffd"):
            return ""
        self._ids = self._ids[self._num_shown :]
        self._num_shown = len(self._ids)
        return new

    def close(self) -> str:
        text = self._tokenizer.decode(self._ids)
        shown_text = self._tokenizer.decode(self._ids[: self._num_shown])
        return text[len(shown_text) :]
