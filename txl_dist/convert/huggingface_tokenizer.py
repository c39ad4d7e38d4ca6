"""Our tokenizers as pipelines of the library `tokenizers`, which needs neither torch nor any code of ours.

Each is compared with ours, on texts of random ids, before it is written. What remains different: texts of more than
64 KiB, which ours cuts first (bpe, unigram); a byte or character that a vocabulary without `<unk>` does not know is
left out there, and refused here; lower case of single letters such as a final sigma; and some vocabularies of others
make their special tokens of what spells them, `</s>`, which ours takes as text.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from txl_dist.errors import DataError
from txl_dist.inference.bundle import Bundle
from txl_dist.io.files import parse_object
from txl_dist.tokenizers.base import END_OF_TEXT, Tokenizer
from txl_dist.tokenizers.characters import ByteTokenizer, CharTokenizer
from txl_dist.tokenizers.foreign import ADDED, HuggingFaceTokenizer
from txl_dist.tokenizers.subwords import BpeTokenizer, UnigramTokenizer, byte_level
from txl_dist.tokenizers.word_tokenizer import WordTokenizer

SAMPLES = ("Hello, world!\n  A line, and 3.14 more.\n", "def f(x):\n    return x\n", "", "\n\n", "a")
"""Texts that are compared, besides those of random ids."""
NUM_RANDOM = 20


def write_tokenizers(folder: Path, bundle: Bundle) -> bool:
    """Write ours as txl_tokenizer.json, and as tokenizer.json the library's; False where there is none."""
    bundle.tokenizer.save(folder / "txl_tokenizer.json")
    library = library_tokenizer(bundle.tokenizer, begins_documents=bundle.begins_documents)
    if library is not None:
        library.save(str(folder / "tokenizer.json"))
    return library is not None


def library_tokenizer(tokenizer: Tokenizer, *, begins_documents: bool) -> Any | None:
    """The same tokenizer as one of the library; with an end-of-text before each text where the model begins documents.
    None if there is none that gives the same ids and texts."""
    library = _pipeline(tokenizer)
    if library is None:
        return None
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing

    library.encode_special_tokens = True
    if tokenizer.end_of_text is not None:
        library.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
        if library.token_to_id(END_OF_TEXT) != tokenizer.end_of_text:
            return None
    if not _gives_the_same(library, tokenizer):
        return None
    if begins_documents and tokenizer.end_of_text is not None:
        mark = (END_OF_TEXT, tokenizer.end_of_text)
        library.post_processor = TemplateProcessing(single=f"{END_OF_TEXT} $A", special_tokens=[mark])
    return library


def _pipeline(tokenizer: Tokenizer) -> Any | None:
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Library

    ids = {symbol: i for i, symbol in enumerate(tokenizer.symbols)}
    match tokenizer:
        case ByteTokenizer():
            library = Library(models.BPE(vocab=ids, merges=[]))
            library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            library.decoder = decoders.ByteLevel()
        case BpeTokenizer():
            merges = [(left, right) for left, right in (merge.split(" ") for merge in tokenizer.merges)]
            library = byte_level(models.BPE(vocab=ids, merges=merges))
            library.decoder = decoders.ByteLevel()
        case UnigramTokenizer():
            library = byte_level(tokenizer._library.model)
            library.decoder = decoders.ByteLevel()
        case CharTokenizer():
            library = Library(models.BPE(vocab=ids, merges=[], unk_token=tokenizer.unknown))
            if tokenizer.lower_case:
                library.normalizer = normalizers.Lowercase()
            known = [] if tokenizer.unknown is None else [decoders.Replace(tokenizer.unknown, "\ufffd")]
            library.decoder = decoders.Sequence([*known, decoders.Fuse()])
        case WordTokenizer(line_start=None):
            library = Library(models.WordLevel(ids, unk_token=tokenizer.unknown or ""))
            steps = [normalizers.Lowercase()] if tokenizer.lower_case else []
            end = tokenizer.line_end
            marks = [] if end is None else [normalizers.Replace("\n", f" {end} ")]
            library.normalizer = normalizers.Sequence([*steps, *marks])
            library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
            # A blank behind each word, but behind the end of a line, which becomes its newline.
            blank = [decoders.Replace(Regex(r"\z"), " ")]
            newline = [] if end is None else [decoders.Replace(f"{end} ", "\n")]
            library.decoder = decoders.Sequence([*blank, *newline, decoders.Fuse()])
        case HuggingFaceTokenizer():
            library = Library.from_str(json.dumps(_renumbered(tokenizer)))
        case _:
            return None
    return library


def _renumbered(tokenizer: HuggingFaceTokenizer) -> dict[str, Any]:
    """The foreign pipeline with our ids."""
    content = parse_object(tokenizer.content)
    ours = {int(foreign): i for i, foreign in enumerate(tokenizer.foreign_ids) if foreign != ADDED}
    model = content["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {symbol: ours[i] for symbol, i in model["vocab"].items()}
    else:  # unigram: ids are places in a list, which must name added tokens too
        scores = dict(map(tuple, model["vocab"]))
        model["vocab"] = [[symbol, scores.get(symbol, min(scores.values()))] for symbol in tokenizer.symbols]
        model["unk_id"] = tokenizer.unknown_id
    content["added_tokens"] = [token | {"id": ours[token["id"]]} for token in content.get("added_tokens", [])]
    if tokenizer.foreign_ids[tokenizer.end_of_text] == ADDED and isinstance(model["vocab"], dict):
        model["vocab"][END_OF_TEXT] = tokenizer.end_of_text
    if model.get("dropout") is not None:
        model["dropout"] = None
    return content | {"truncation": None, "padding": None, "post_processor": None}


def _gives_the_same(library: Any, tokenizer: Tokenizer) -> bool:
    drawn = random.Random(0)
    others = [i for i in range(tokenizer.vocab_size) if i != tokenizer.end_of_text]
    texts = [*SAMPLES, *(tokenizer.decode(drawn.choices(others, k=50)) for _ in range(NUM_RANDOM))]
    special = [token.content for token in library.get_added_tokens_decoder().values() if token.special]
    for text in texts:
        if any(symbol in text for symbol in special):
            continue
        try:
            ids = [int(i) for i in tokenizer.encode_prompt(text)]
        except DataError:  # of characters that the vocabulary does not have
            continue
        if library.encode(text, add_special_tokens=False).ids != ids:
            return False
        if library.decode(ids, skip_special_tokens=False) != tokenizer.decode(ids):
            return False
    return True
