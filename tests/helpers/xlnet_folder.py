"""Small folders of XLNet with a tokenizer of the same kind as XLNet's own (unigram, with `<eod>`)."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library
from tokenizers.models import Unigram
from tokenizers.trainers import UnigramTrainer

from tests.helpers.corpora import random_texts
from tests.helpers.xlnet import GOLDEN
from txl_dist.tokenizers.importing import open_tokenizer

CONTROL = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>"]
MARKS = ["<eop>", ".", "(", ")", '"', "-"]
TEXTS = [*random_texts(count=30, seed=4), "the cat sat (on the mat) and the dog saw the cat. " * 10]


def fast_tokenizer() -> Library:
    """A tokenizer.json like that of xlnet-base-cased, with fewer pieces."""
    library = Library(Unigram())
    library.normalizer = normalizers.Sequence(
        [
            normalizers.Replace("``", '"'),
            normalizers.Replace("''", '"'),
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    library.decoder = decoders.Metaspace()
    library.train_from_iterator(TEXTS, UnigramTrainer(vocab_size=120, show_progress=False))
    pieces = [(symbol, score) for symbol, score in json.loads(library.to_str())["model"]["vocab"]]
    first = [*CONTROL, *MARKS]
    vocabulary = [(symbol, 0.0) for symbol in first] + [piece for piece in pieces if piece[0] not in first]
    library.model = Unigram(vocabulary, unk_id=0)
    library.add_special_tokens([*CONTROL[:6], AddedToken("<mask>", lstrip=True), "<eod>", "<eop>"])
    library.post_processor = processors.TemplateProcessing(
        single="$A:0 <sep>:0 <cls>:2",
        pair="$A:0 <sep>:0 $B:1 <sep>:1 <cls>:2",
        special_tokens=[("<sep>", 4), ("<cls>", 3)],
    )
    return library


def spiece_model() -> bytes:
    """A spiece.model that is made with the flags of XLNet's README, with fewer pieces."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=model,
        vocab_size=120,
        hard_vocab_limit=False,
        character_coverage=0.99995,
        control_symbols=CONTROL[3:],
        user_defined_symbols=MARKS,
        minloglevel=2,
    )
    return model.getvalue()


def xlnet_folder(tmp_path: Path, tokenizer: str) -> Path:
    """A folder like that of xlnet-base-cased on the Hub, with the golden's small layers."""
    folder = tmp_path / "xlnet"
    folder.mkdir()
    if tokenizer == "spiece.model":
        (folder / tokenizer).write_bytes(spiece_model())
    else:
        fast_tokenizer().save(str(folder / tokenizer))
    vocab_size = open_tokenizer(folder / tokenizer).vocab_size
    shutil.copy(GOLDEN / "config.json", folder)
    config: dict[str, Any] = json.loads((GOLDEN / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
    weights = load_file(GOLDEN / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    weights["transformer.word_embedding.weight"] = 0.02 * torch.randn(
        vocab_size, config["d_model"], generator=generator
    )
    weights["lm_loss.bias"] = torch.zeros(vocab_size)
    weights.pop("lm_loss.weight", None)
    save_file(weights, folder / "model.safetensors")
    return folder
