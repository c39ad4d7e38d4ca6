"""Conversion of this package's tokenizers to pipelines of the library `tokenizers`.

The library needs neither torch nor this package. Before a pipeline is written, sample texts and texts of random ids are
encoded and decoded by the pipeline and by this package's tokenizer, and the results are compared. These differences
remain:

    long texts            Before bpe and unigram encode a text, they cut it into pieces of about 64 KiB. The library
                          encodes every text as a whole.
    unknown characters    Without `<unk>` in the vocabulary, the library skips them. This package raises DataError.
    lower case            The library lowers some single letters in another way, for example a final sigma.
    special tokens        With some imported vocabularies, the library reads `</s>` in a text as a special token. This
                          package reads it as text.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from txl_dist.errors import DataError
from txl_dist.inference.bundle import Bundle
from txl_dist.io.files import parse_object
from txl_dist.tokenizers.base import END_OF_TEXT, UNKNOWN, Tokenizer
from txl_dist.tokenizers.characters import ByteTokenizer, CharTokenizer
from txl_dist.tokenizers.foreign import ADDED, HuggingFaceTokenizer
from txl_dist.tokenizers.subwords import BpeTokenizer, UnigramTokenizer, byte_level
from txl_dist.tokenizers.word_tokenizer import WordTokenizer

SAMPLES = ("Hello, world!\n  A line, and 3.14 more.\n", "def f(x):\n    return x\n", "", "\n\n", "a")
"""Texts on which the library's tokenizer is compared with this package's tokenizer, in addition to texts of random
ids."""
NUM_RANDOM = 20
"""Number of texts of random ids on which the two tokenizers are compared."""


def write_tokenizers(folder: Path, bundle: Bundle) -> bool:
    """Write a bundle's tokenizer as txl_tokenizer.json, and as tokenizer.json for the library `tokenizers`.

    If the library has no equal tokenizer, tokenizer.json is not written. Returns True if tokenizer.json was written.
    """
    bundle.tokenizer.save(folder / "txl_tokenizer.json")
    library = library_tokenizer(bundle.tokenizer, begins_documents=bundle.begins_documents)
    if library is not None:
        library.save(str(folder / "tokenizer.json"))
    return library is not None


def special_tokens_of(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the special tokens of a tokenizer, by the names that tokenizer_config.json gives them."""
    special_tokens: dict[str, str] = {}
    if UNKNOWN in tokenizer.symbols:
        special_tokens["unk_token"] = UNKNOWN
    if tokenizer.end_of_text is not None:
        end = tokenizer.symbols[tokenizer.end_of_text]
        special_tokens |= dict.fromkeys(("bos_token", "eos_token", "pad_token"), end)
    return special_tokens


def library_tokenizer(tokenizer: Tokenizer, *, begins_documents: bool) -> Any | None:
    """Return a tokenizer of the library `tokenizers` that encodes and decodes as `tokenizer` does.

    Returns None if the library has no such tokenizer.

    With `begins_documents` the returned tokenizer adds an end-of-text token before each text, if the vocabulary has
    one.
    """
    library = _pipeline(tokenizer)
    if library is None:
        return None
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing

    library.encode_special_tokens = True
    end = None if tokenizer.end_of_text is None else tokenizer.symbols[tokenizer.end_of_text]
    if end is not None:
        library.add_special_tokens([AddedToken(end, special=True, normalized=False)])
        if library.token_to_id(end) != tokenizer.end_of_text:
            return None
    if not _gives_the_same(library, tokenizer):
        return None
    if begins_documents and end is not None:
        mark = (end, tokenizer.end_of_text)
        library.post_processor = TemplateProcessing(single=f"{end} $A", special_tokens=[mark])
    return library


def _pipeline(tokenizer: Tokenizer) -> Any | None:
    """Build the library's pipeline for this kind of tokenizer, without special tokens.

    Returns None if the library has no such pipeline.
    """
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Library

    ids = {symbol: i for i, symbol in enumerate(tokenizer.symbols)}
    match tokenizer:
        case ByteTokenizer():
            library = Library(models.BPE(vocab=ids, merges=[]))
            library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            library.decoder = decoders.ByteLevel()
        case BpeTokenizer():
            merges: list[tuple[str, str]] = []
            for merge in tokenizer.merges:
                left, right = merge.split(" ")
                merges.append((left, right))
            library = byte_level(models.BPE(vocab=ids, merges=merges))
            library.decoder = decoders.ByteLevel()
        case UnigramTokenizer():
            library = byte_level(tokenizer._library.model)
            library.decoder = decoders.ByteLevel()
        case CharTokenizer():
            library = Library(models.BPE(vocab=ids, merges=[], unk_token=tokenizer.unknown))
            if tokenizer.lower_case:
                library.normalizer = normalizers.Lowercase()
            decoding: list[Any] = []
            if tokenizer.unknown is not None:
                decoding.append(decoders.Replace(tokenizer.unknown, "\ufffd"))
            decoding.append(decoders.Fuse())
            library.decoder = decoders.Sequence(decoding)
        case WordTokenizer(line_start=None):
            library = Library(models.WordLevel(ids, unk_token=tokenizer.unknown or ""))
            normalizing: list[Any] = []
            # A blank follows each word. After the end of a line, blank and mark become a newline.
            decoding = [decoders.Replace(Regex(r"\z"), " ")]
            if tokenizer.lower_case:
                normalizing.append(normalizers.Lowercase())
            if tokenizer.line_end is not None:
                normalizing.append(normalizers.Replace("\n", f" {tokenizer.line_end} "))
                decoding.append(decoders.Replace(f"{tokenizer.line_end} ", "\n"))
            decoding.append(decoders.Fuse())
            library.normalizer = normalizers.Sequence(normalizing)
            library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
            library.decoder = decoders.Sequence(decoding)
        case HuggingFaceTokenizer():
            library = Library.from_str(json.dumps(_renumbered(tokenizer)))
        case _:
            return None
    return library


def _renumbered(tokenizer: HuggingFaceTokenizer) -> dict[str, Any]:
    """Return the content of another program's tokenizer.json, in which this package's ids replace the ids of that
    program."""
    content = parse_object(tokenizer.content)
    own_ids = {int(foreign): i for i, foreign in enumerate(tokenizer.foreign_ids) if foreign != ADDED}
    model = content["model"]
    has_ids = isinstance(model["vocab"], dict)
    if has_ids:
        model["vocab"] = {symbol: own_ids[foreign] for symbol, foreign in model["vocab"].items()}
    else:  # unigram: an id is an index in a list, which must contain added tokens too
        scores = {symbol: score for symbol, score in model["vocab"]}
        lowest = min(scores.values())
        model["vocab"] = [[symbol, scores.get(symbol, lowest)] for symbol in tokenizer.symbols]
        model["unk_id"] = tokenizer.unknown_id
    added_tokens: list[dict[str, Any]] = []
    for token in content.get("added_tokens", []):
        own_id = own_ids[token["id"]]
        added_tokens.append({**token, "id": own_id})
    content["added_tokens"] = added_tokens
    is_end_added = tokenizer.foreign_ids[tokenizer.end_of_text] == ADDED
    if is_end_added and has_ids:
        model["vocab"][END_OF_TEXT] = tokenizer.end_of_text
    if model.get("dropout") is not None:
        model["dropout"] = None
    return {**content, "truncation": None, "padding": None, "post_processor": None}


def _gives_the_same(library: Any, tokenizer: Tokenizer) -> bool:
    """Return True if both tokenizers encode and decode the sample texts in the same way.

    Texts that contain a special token, or characters outside the vocabulary, are left out.
    """
    generator = random.Random(0)
    ordinary_ids = [i for i in range(tokenizer.vocab_size) if i != tokenizer.end_of_text]
    texts = list(SAMPLES)
    for _ in range(NUM_RANDOM):
        random_ids = generator.choices(ordinary_ids, k=50)
        texts.append(tokenizer.decode(random_ids))
    special = [token.content for token in library.get_added_tokens_decoder().values() if token.special]
    for text in texts:
        if any(symbol in text for symbol in special):
            continue
        try:
            ids = [int(i) for i in tokenizer.encode_prompt(text)]
        except DataError:  # the vocabulary does not have all characters
            continue
        if library.encode(text, add_special_tokens=False).ids != ids:
            return False
        if library.decode(ids, skip_special_tokens=False) != tokenizer.decode(ids):
            return False
    return True
