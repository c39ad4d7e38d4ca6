"""The records of a run about the units of its text, and a console line without bits per byte."""

from pathlib import Path

from tests.helpers.corpora import tiny_corpus
from tests.helpers.logs import format_record
from txl_dist.config.schema import TrainSection
from txl_dist.train.report.validation import text_facts


def test_a_start_records_why_there_are_no_bits_by_kind_of_record(tmp_path: Path) -> None:
    texts = [f"the cat sat on mat {number}" for number in range(30)]
    whole, lossy = (tiny_corpus(tmp_path, name=kind, texts=texts, kind=kind) for kind in ("byte", "word"))
    split = whole.split("train")
    known = text_facts([split], {"eval": whole.split("valid")}, mask_documents=True)
    assert known == {
        "corpora": ["byte"],
        "tokenizer": "byte",
        "vocab_size": whole.vocab_size,
        "token": "token",
        "no_bits": {},
        "held_out_bytes": whole.split("valid").text_bytes,
    }
    held_out = {"eval": lossy.split("valid"), "eval_news": whole.split("valid")}
    facts = text_facts([lossy.split("train")], held_out, mask_documents=False)
    assert facts["token"] == "word"
    assert facts["no_bits"].keys() == {"train", "eval"}
    assert "the tokenizer (word) does not restore" in facts["no_bits"]["eval"]
    part = text_facts([split], {"eval": whole.split("valid")}, mask_documents=False, max_tokens=20)["no_bits"]
    assert part.keys() == {"eval"}
    assert "only the first 20 of the" in part["eval"]
    assert "held_out_bytes" not in text_facts([split], {}, mask_documents=False)
    half = text_facts(
        [split], {"eval": whole.split("valid")}, mask_documents=False, unscored=TrainSection(half_loss=True).unscored
    )["no_bits"]
    assert half == {"train": "only the recent half of each segment is scored (train.half_loss)"}


def test_a_line_without_bits_shows_perplexity_and_the_share_of_unknown_tokens() -> None:
    record = {"step": 40, "loss": 2.0, "ppl": 7.389, "unknown_pct": 4.321, "tokens": 1200, "seconds": 0.5}
    line = format_record("eval", record, max_steps=99)
    assert "loss 2.0000  ppl 7.39  unknown 4.32%" in line
    assert "bpb" not in line
