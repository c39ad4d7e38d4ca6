"""Compressors for comparison get exactly the text for which bits per byte are computed."""

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.corpora import random_texts, tiny_corpus
from tools.experiments import anchors, recipes
from tools.experiments.anchors import BEGIN, COMPRESSORS, PAGE, Compressor, compressed, measure, of_recipes, table_of
from tools.experiments.recording import Rows, table_in
from tools.experiments.texts import mark_of_text, marked_text
from txl_dist.config.load import Config, changed
from txl_dist.data.loader.corpus import open_corpus
from txl_dist.errors import DataError, TxlError

NEW = ["\u00ff is not a mark, nor are bytes like \u4e2d's", ""]


def recorded() -> list[dict[str, str]]:
    return Rows(anchors.RECORDS, anchors.COLUMNS).rows


@pytest.mark.parametrize("settings", [{"kind": "byte"}, {"kind": "bpe", "vocab_size": 300}, {"kind": "char"}], ids=str)
def test_the_text_is_that_of_the_documents_each_with_a_mark_behind(tmp_path: Path, settings: dict[str, object]) -> None:
    corpus = tiny_corpus(tmp_path, texts=[*random_texts(count=40), *NEW], tokenizer_all_splits=True, **settings)
    given = [json.loads(line)["text"] for line in (tmp_path / "corpus.jsonl").read_text().split("\n") if line]
    found = list[bytes]()
    for name in corpus.split_names:
        text, split = marked_text(corpus.split(name)), corpus.split(name)
        *documents, rest = text.split(b"\xff")
        assert (rest, len(documents), len(b"".join(documents))) == (b"", split.documents, split.text_bytes)
        found += documents
    assert sorted(found) == sorted(text.encode() for text in given if text)


def test_where_tokens_say_no_end_of_documents_no_mark_does(tmp_path: Path) -> None:
    split = tiny_corpus(tmp_path, kind="char", tokenizer_all_splits=True, end_of_text=False).split("valid")
    text = marked_text(split)
    assert (split.tokens, split.text_bytes) == (len(text.decode()), len(text))


def test_text_that_tokens_do_not_give_back_is_refused(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path, texts=[f"{i}  two blanks\n" for i in range(30)], kind="word")
    with pytest.raises(DataError, match=r"does not restore.*a lossless tokenizer"):
        marked_text(corpus.split("valid"))


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda one: one.name)
def test_a_primed_program_pays_little_for_what_it_has_read(compressor: Compressor) -> None:
    if shutil.which(compressor.program) is None:
        pytest.skip(f"needs {compressor.package}")
    text = "".join(random_texts(count=30)).encode()
    figure = compressed(compressor, text, text, num_bytes=len(text))
    assert figure.cold_size is not None
    assert figure.cold is not None
    assert figure.primed < 0.75 * figure.cold
    assert figure.cold == round(8 * figure.cold_size / len(text), 4)


def test_a_program_that_fails_is_told() -> None:
    with pytest.raises(TxlError, match=r"^cat --no-such-flag .*ended with 1: .*no-such-flag"):
        compressed(Compressor("cat", "cat --no-such-flag", ""), b"a", b"b", num_bytes=1)


def test_what_is_recorded_is_not_measured_again_and_a_missing_program_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = (Compressor("copy", "cat", ""), Compressor("other", "no-such-program OUT", "other-utils"))
    monkeypatch.setattr(anchors, "RECORDS", tmp_path / "anchors.csv")
    monkeypatch.setattr(anchors, "COMPRESSORS", programs)
    corpus = tiny_corpus(tmp_path, texts=random_texts(count=30))
    measure(corpus, split="valid", train="train", is_trial=False)
    first, rows = capsys.readouterr().out, recorded()
    assert "no program no-such-program: apt-get install other-utils" in first
    assert [row["anchor"].partition(" (")[0] for row in rows] == ["order 0", "bigram", "copy"]
    marks = corpus.split("valid").documents / corpus.split("valid").text_bytes
    assert [float(rows[2][name]) for name in ("cold", "primed")] == pytest.approx([8 + 8 * marks] * 2, abs=1e-4)
    measure(corpus, split="valid", train="train", is_trial=False)
    assert recorded() == rows
    assert "copy" not in capsys.readouterr().out
    assert table_of(rows, recipes={})[2].startswith("| corpus, valid | ")
    assert table_of(rows, recipes={rows[0]["sha256"]: "1.234"})[2].endswith(" | 1.234 |")


def test_other_tokens_of_a_known_text_are_counted_anew_and_compressed_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anchors, "RECORDS", tmp_path / "anchors.csv")
    monkeypatch.setattr(anchors, "COMPRESSORS", (Compressor("copy", "cat", ""),))
    texts = random_texts(count=60)
    for kind in ("byte", "char", "byte", "char"):
        if not (tmp_path / kind).exists():
            tiny_corpus(tmp_path, name=kind, texts=texts, kind=kind, tokenizer_all_splits=True)
        measure(open_corpus(tmp_path / kind), split="valid", train="train", is_trial=False)
    rows = recorded()
    assert [anchors.kind_of(row["anchor"]) for row in rows] == ["order 0", "bigram", "copy", "order 0", "bigram"]
    assert table_of(rows, recipes={}) == table_of(rows[:3], recipes={}), "the table shows what came first"


def test_a_recipe_stands_beside_the_anchors_of_the_very_text_that_it_was_scored_on(tmp_path: Path) -> None:
    row = {"recipe": "a", "score": "--split valid --num-lanes 16", "bits_per_byte": "1.23456", "text": "0123"}
    lossy = row | {"recipe": "c", "bits_per_byte": "", "text": ""}
    other = row | {"recipe": "d", "bits_per_byte": "1.3", "text": "4567"}
    found = of_recipes([row, row | {"recipe": "b", "bits_per_byte": "1.2"}, lossy, other])
    assert found == {"0123": "a 1.235, b 1.200", "4567": "d 1.300"}
    texts = ["one text", "and another text"] * 30
    in_bytes, in_pieces = (
        tiny_corpus(tmp_path, name=kind, texts=texts, kind=kind, valid_fraction=0.3) for kind in ("byte", "bpe")
    )
    marks = {
        recipes.text_of(changed(Config(), {"data.path": str(one.folder)}), "--split valid --num-lanes 16")
        for one in (in_bytes, in_pieces)
    }
    assert marks == {mark_of_text(marked_text(in_bytes.split("valid")))}
    words = tiny_corpus(tmp_path, name="word", texts=texts, kind="word", valid_fraction=0.3, lower_case=True)
    of_words = changed(Config(), {"data.path": str(words.folder)})
    assert recipes.text_of(of_words, "--split valid --protocol nanogpt") == ""


def test_the_page_shows_the_table_of_the_records() -> None:
    scored = Rows(recipes.RECORDS, recipes.COLUMNS).rows
    assert table_in(PAGE, BEGIN) == table_of(recorded(), recipes=of_recipes(scored))
