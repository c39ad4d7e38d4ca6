"""XLNet's own tokenizer: an import keeps its ids, `<eod>` ends a document, and an export encodes like the imported
one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.xlnet_folder import CONTROL, TEXTS, xlnet_folder
from txl_dist.convert.export import export_to_xlnet
from txl_dist.convert.importer import import_model
from txl_dist.data.loader.corpus import open_corpus
from txl_dist.data.prepare.run import prepare_corpus
from txl_dist.inference.bundle import load_bundle
from txl_dist.tokenizers.foreign import ForeignTokenizer
from txl_dist.tokenizers.importing import import_tokenizer, open_tokenizer

SAMPLES = [*TEXTS[:5], "the cat's naïve dog", "", "two  blanks\nand a line"]
KINDS = ["tokenizer.json", "spiece.model"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_import_brings_the_tokenizer_with_its_ids_and_its_end_of_document(tmp_path: Path, kind: str) -> None:
    folder = xlnet_folder(tmp_path, kind)
    assert import_model(folder, tmp_path / "bundle", format="xlnet").has_vocabulary
    tokenizer = load_bundle(tmp_path / "bundle").tokenizer
    assert isinstance(tokenizer, ForeignTokenizer)
    assert tokenizer.has_foreign_ids
    assert tokenizer.end_of_text == 7
    assert tokenizer.symbols[:9] == (*CONTROL, "<eop>")
    ids = [*tokenizer.encode("the cat").tolist(), 7, *tokenizer.encode("the dog").tolist()]
    assert tokenizer.decode(ids) == "the cat<eod>the dog"
    assert "".join(tokenizer.decode_stream(ids)) == tokenizer.decode(ids)
    assert 7 not in tokenizer.encode("a <eod> b")


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_encodes_with_the_export_as_with_the_imported_folder(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = xlnet_folder(tmp_path, kind)
    import_model(folder, tmp_path / "bundle", format="xlnet")
    export_to_xlnet(tmp_path / "bundle", tmp_path / "out")
    if kind == "spiece.model":
        assert (tmp_path / "out" / kind).read_bytes() == (folder / kind).read_bytes()
        before = transformers.XLNetTokenizer.from_pretrained(folder)
    else:
        before = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / kind))
    after = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    tokenizer = load_bundle(tmp_path / "bundle").tokenizer
    for text in SAMPLES:
        ids = after(text).input_ids
        assert ids == before(text).input_ids
        if kind == "tokenizer.json":
            assert ids == [*tokenizer.encode(text).tolist(), 4, 3]
    assert (after.sep_token, after.cls_token, after.pad_token, after.eos_token) == ("<sep>", "<cls>", "<pad>", "</s>")
    assert after.padding_side == "left"
    assert "token_type_ids" in after("the cat")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert [config[f"{role}_token_id"] for role in ("bos", "eos", "pad")] == [1, 2, 5]


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_imported_with_the_same_tokenizer(tmp_path: Path, kind: str) -> None:
    import_model(xlnet_folder(tmp_path, kind), tmp_path / "bundle", format="xlnet")
    export_to_xlnet(tmp_path / "bundle", tmp_path / "out")
    import_model(tmp_path / "out", tmp_path / "again", format="xlnet")
    fingerprints = [load_bundle(tmp_path / name).tokenizer.fingerprint for name in ("bundle", "again")]
    assert fingerprints[0] == fingerprints[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_corpus_of_the_imported_tokenizer_has_its_ids_and_ends_documents_with_its_token(
    tmp_path: Path, kind: str
) -> None:
    import_model(xlnet_folder(tmp_path, kind), tmp_path / "bundle", format="xlnet")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare_corpus(
        tmp_path / "corpus",
        inputs=[tmp_path / "texts.jsonl"],
        tokenizer_path=tmp_path / "bundle/tokenizer.json",
        valid_fraction=0.0,
    )
    corpus = open_corpus(tmp_path / "corpus")
    assert corpus.tokenizer.fingerprint == load_bundle(tmp_path / "bundle").tokenizer.fingerprint
    assert corpus.tokenizer.end_of_text == 7
    assert corpus.split("train").counts()[7] == len(TEXTS)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_in_order_of_frequency_keep_the_token_that_ends_a_document(tmp_path: Path, kind: str) -> None:
    folder = xlnet_folder(tmp_path, kind)
    tokenizer = import_tokenizer(folder / kind, lambda: TEXTS)
    assert isinstance(tokenizer, ForeignTokenizer)
    assert not tokenizer.has_foreign_ids
    assert tokenizer.end_of_text is not None
    assert tokenizer.foreign_ids[tokenizer.end_of_text] == 7
    assert tokenizer.vocab_size == open_tokenizer(folder / kind).vocab_size
