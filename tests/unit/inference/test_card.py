"""Model cards contain the known facts, have "not stated" for unknown facts, and can be read by the Hub's library."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from tests.helpers.bundles import make
from tests.helpers.made_runs import HOSTILE
from txl_dist.artifacts import ArtifactKind
from txl_dist.cli.main import main
from txl_dist.config.schema import ModelSection
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.inference.bundle import load_bundle
from txl_dist.inference.card import LICENSES, Card, Model, Sample, Score, Stated, license_fields, readme, score_rows
from txl_dist.io.manifest import problems_of, write_manifest

GOLDEN = Path(__file__).parents[2] / "golden/checkpoint_v2/step_000000016"
KINDS = (ArtifactKind.BUNDLE, ArtifactKind.HUGGINGFACE, ArtifactKind.HUGGINGFACE_CODE, ArtifactKind.ONNX)
SCORE = Score(corpus="wiki", split="valid", loss=3.5, ppl=33.1, bits_per_byte=1.25, tokens=1234, segment_len=32,
              memory_len=64, num_lanes=8)  # fmt: skip
TEXTS = (
    *("plain", 'it\'s "quoted"', "a: b # no comment", "- item", "| cell | cell", "```\nfence", "---", "*bold* _it_"),
    *("[link](http://192.0.2.1)", HOSTILE, "\u5c71\u7530 \U0001f600", "caf\u00e9", "null", "0x1F", "back\\slash"),
)


def made(card: Card, **changes: Any) -> Model:
    section = ModelSection(num_layers=2, width=64, cutoffs=(250, 500))
    known: dict[str, Any] = {"section": section, "vocab_size": 1000, "segment_len": 32, "memory_len": 64}
    known |= {"dtype": "fp32", "tokenizer": "bpe", "num_parameters": 172_906, "num_bytes": 694_000}
    return Model(**known | changes, card=card)


def metadata(text: str) -> dict[str, Any]:
    """What the library and a plain reader of YAML make of the block; both must agree."""
    block = yaml.safe_load(text.split("---\n")[1])
    assert isinstance(block, dict)
    assert ModelCard(text).data.to_dict() == block
    return block


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_card_says_not_stated_and_guesses_nothing(kind: ArtifactKind) -> None:
    text = readme(made(Card(), tokenizer=None, num_parameters=None, num_bytes=None), kind)
    block = metadata(text)
    assert not {"license", "license_name", "base_model", "model-index", "language", "datasets"} & block.keys()
    for name in ("Parameters", "Tokenizer", "Training text", "License", "License of the training text", "Author"):
        assert f"| {name} | not stated |" in text
    for name in ("Training tokens", "Date of the weights", "Base model", "Began with", "Origin"):
        assert f"| {name} | not stated |" in text
    assert text.count("Not stated.") == 2, "scores and sample"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_any_text_in_any_place_leaves_a_card_that_the_hub_reads(kind: ArtifactKind, text: str) -> None:
    score = SCORE.model_copy(update={"corpus": text, "split": text})
    card = Card(name=text, license=text, author=text, data_license=text, corpora=(text, "b"), began_with=text,
                commit=text, tokens_seen=5, scores=(score,),
                sample=Sample(prompt=text, text=text, how="so"))  # fmt: skip
    made_text = readme(made(card, source={"run": text, "step": 7}), kind)
    block = metadata(made_text)
    assert block["license"] == "other"
    (index,) = block["model-index"]
    (result,) = ModelCard(made_text).data.eval_results[:1]
    assert result.metric_value == 3.5
    assert index["results"][0]["dataset"]["name"] == result.dataset_name
    outside = made_text.split("---\n", 2)[2].split("## Sample")[0]
    assert "<script" not in outside.replace("\\<", "")
    assert "](http://192" not in outside.replace("\\]", "")


@pytest.mark.parametrize(
    ("spelt", "wanted"),
    [
        ("apache-2.0", {"license": "apache-2.0"}),
        ("Apache-2.0", {"license": "apache-2.0"}),
        ("CC-BY-SA-4.0", {"license": "cc-by-sa-4.0"}),
        ("openrail++", {"license": "openrail++"}),
        ("ACME Research, v2", {"license": "other", "license_name": "acme-research-v2"}),
        ("\u5c71", {"license": "other", "license_name": "other"}),
        ("", {}),
    ],
)
def test_a_license_is_an_identifier_of_the_hub_or_other_with_a_name(spelt: str, wanted: dict[str, str]) -> None:
    assert license_fields(spelt) == wanted
    assert not wanted or wanted["license"] in LICENSES


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"name": "two\nlines"}, "--name"),
        ({"author": "bell\a"}, "--author"),
        ({"license": "half \ud83d"}, "--license"),
        ({"data_license": "x" * 501}, "--data-license has 501 characters"),
        ({"author": "  "}, "--author is blank"),
        ({"base_model": "gpt2"}, "OWNER/NAME"),
        ({"base_model": "https://huggingface.co/a/b"}, "OWNER/NAME"),
        ({"base_model": "a/b/c"}, "OWNER/NAME"),
        ({"base_model": "a/-b"}, "OWNER/NAME"),
    ],
)
def test_what_no_card_can_say_is_refused_by_its_flag(stated: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Stated(**stated).check()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("apache2", "apache-2.0"),
        ("Apache 2.0", "apache-2.0"),
        ("apache2.0", "apache-2.0"),
        ("Apache License, Version 2.0", "apache-2.0"),
        ("MIT License", "mit"),
        ("GPLv3", "gpl-3.0"),
        ("CC BY-SA 4.0", "cc-by-sa-4.0"),
        ("bsd_3_clause", "bsd-3-clause"),
    ],
)
def test_an_identifier_in_another_spelling_is_refused_with_that_of_the_hub(typed: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"Type --license {meant}.")):
        Stated(license=typed).check()


@pytest.mark.parametrize("license", [*LICENSES, "MIT", "ACME Research, v2", "proprietary", "apache-2.0 with changes"])
def test_identifiers_and_names_of_other_licenses_are_taken(license: str) -> None:
    Stated(license=license).check()


def test_an_unknown_license_is_said_with_the_one_that_was_meant() -> None:
    assert "apache-2.0?" in Stated(license="apache").remark()
    assert "metadata contain license: other" in Stated(license="ACME Research, v2").remark()
    assert "Give the name" in Stated(license="other").remark()
    assert Stated(license="MIT").remark() == "" == Stated().remark()


@pytest.mark.parametrize("kind", KINDS)
def test_every_table_of_a_card_has_a_head_and_no_empty_cell(kind: ArtifactKind) -> None:
    """Markdown shows the missing head of a table as an empty row."""
    lines = readme(made(Card(scores=(SCORE.model_copy(update={"split": ""}),))), kind).splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    assert len(rows) > 20
    assert [row for row in rows if not all(cell.strip() for cell in row)] == []


def test_a_fence_is_longer_than_any_in_the_sample() -> None:
    sample = Sample(prompt="", text="a\n````\nb", how="so")
    assert "`````text\na\n````\nb\n`````" in readme(made(Card(sample=sample)), ArtifactKind.BUNDLE)


@pytest.mark.parametrize(("kind", "flag"), [("bpe", '--prompt "The "'), ("byte", '--prompt "The "'),
                                            ("word", "--tokens 1 2 3"), ("listed", "--tokens 1 2 3")])  # fmt: skip
def test_commands_on_a_card_ask_in_a_form_that_the_tokenizer_takes(kind: str, flag: str) -> None:
    assert f"txl generate . {flag} --max-tokens 40" in readme(made(Card(), tokenizer=kind), ArtifactKind.BUNDLE)


def test_a_bundle_loads_whatever_people_do_to_its_readme_and_hubs_leave_there(tmp_path: Path) -> None:
    bundle = make(tmp_path / "a").bundle
    assert metadata((bundle / "README.md").read_text())["library_name"] == "txl_dist"
    (bundle / "README.md").write_text("mine")
    (bundle / "LICENSE").write_text("mine too")
    (bundle / ".gitattributes").write_text("* text")
    (bundle / ".cache/huggingface").mkdir(parents=True)
    (bundle / ".cache/huggingface/x").touch()
    assert problems_of(bundle) == []
    load_bundle(bundle)
    (bundle / "README.md").unlink()
    assert main(["verify", str(bundle)]) == 0
    load_bundle(bundle)


@pytest.mark.parametrize("name", ["card.json", "readme.md", "weights.md", "sub/README.md", "sub/.hidden"])
def test_all_other_files_of_a_bundle_are_still_held_against_its_manifest(tmp_path: Path, name: str) -> None:
    bundle = make(tmp_path / "a").bundle
    (bundle / name).parent.mkdir(exist_ok=True)
    (bundle / name).write_text("{}")
    with pytest.raises(CheckpointError, match=name):
        load_bundle(bundle)


def test_a_bundle_of_an_older_program_loads_and_shows_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = make(tmp_path / "a").bundle
    manifest = json.loads((bundle / "MANIFEST.json").read_text())
    for name in ("README.md", "card.json"):
        (bundle / name).unlink()
        del manifest["files"][name]
    write_manifest(bundle, manifest["files"])
    assert load_bundle(bundle).card == Card()
    assert main(["report", str(bundle)]) == 0
    assert "not stated" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["[]", '{"tokens_seen": "many"}', "{", '{"scores": [{"loss": 1}]}'])
def test_a_card_of_another_form_is_one_line_that_names_the_file(tmp_path: Path, content: str) -> None:
    from txl_dist.io.manifest import describe_file, files_of

    bundle = make(tmp_path / "a").bundle
    (bundle / "card.json").write_text(content)
    write_manifest(bundle, {name: describe_file(bundle / name) for name in files_of(bundle)})
    with pytest.raises(CheckpointError, match=r"card\.json"):
        load_bundle(bundle)


RECORDS = [
    {"kind": "event", "event": "start", "step": 0, "commit": "aaaa", "corpora": ["books"], "token": "token"},
    {"kind": "eval", "step": 16, "loss": 9.0, "ppl": 8103.1, "tokens": 10},
    {"kind": "event", "event": "start", "step": 8, "commit": "bbbb", "corpora": ["books", "code"], "token": "token"},
    {"kind": "train", "step": 16, "epoch": 0.5, "loss": 2.0},
    {"kind": "sample", "step": 16, "prompt": "ab", "text": "cd"},
    {"kind": "event", "event": "saved", "step": 16, "time_s": 1_790_000_000.0},
    {"kind": "eval", "step": 16, "loss": 2.0, "ppl": 7.39, "tokens": 10, "bits_per_byte": 1.1},
    {"kind": "eval_code", "step": 16, "loss": 3.0, "ppl": 20.1, "tokens": 10.5},
    {"kind": "eval", "step": 17, "loss": 1.0, "ppl": 2.7, "tokens": 10},
    {"kind": "sample", "step": 17, "prompt": "no", "text": "no"},
    {"kind": "event", "event": "start", "step": 16, "commit": "cccc", "corpora": ["other"], "token": "token"},
]


def exported(tmp_path: Path, lines: list[str], *flags: str) -> tuple[Card, str]:
    """The golden checkpoint in a run with these records, exported."""
    run = tmp_path / "wiki"
    shutil.copytree(GOLDEN, run / "checkpoints" / GOLDEN.name)
    shutil.copy(GOLDEN / "config.toml", run)
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["export", str(run), str(tmp_path / "bundle"), *flags]) == 0
    return load_bundle(tmp_path / "bundle").card, (tmp_path / "bundle/README.md").read_text()


def test_an_exported_card_has_what_the_run_recorded_of_this_very_step(tmp_path: Path) -> None:
    card, text = exported(tmp_path, [json.dumps(record) for record in RECORDS], "--author", "A. B.")
    assert (card.commit, card.corpora, card.epochs, card.date) == ("bbbb", ("books", "code"), 0.5, "2026-09-21")
    assert [(score.corpus, score.loss) for score in card.scores] == [("books", 2.0)], "10.5 tokens are no count"
    assert card.sample is not None
    assert (card.sample.prompt, card.sample.text) == ("ab", "cd")
    assert card.tokens_seen == json.loads((GOLDEN / "state.json").read_text())["tokens_seen"]
    assert "| Author | A. B. |" in text
    assert "step 16 of the run wiki" in text


@pytest.mark.parametrize(
    "lines", [[], ["{torn"], ['{"step": 16, "kind": 3}'], ['{"kind": "eval", "step": 16, "loss": null, "ppl": 1}']]
)
def test_a_run_without_sound_records_gives_a_card_that_does_not_state_them(tmp_path: Path, lines: list[str]) -> None:
    card, text = exported(tmp_path, lines)
    assert (card.commit, card.date, card.scores) == ("", "", ())
    assert "| Commit of txl\\_dist | not stated |" in text


def test_an_export_of_a_bundle_keeps_its_card_and_takes_what_is_stated_now(tmp_path: Path) -> None:
    card, _ = exported(tmp_path, [json.dumps(record) for record in RECORDS], "--author", "A. B.", "--name", "first")
    again = ["export", str(tmp_path / "bundle"), str(tmp_path / "again"), "--name", "second", "--license", "mit"]
    assert main(again) == 0
    assert load_bundle(tmp_path / "again").card == card.model_copy(update={"name": "second", "license": "mit"})


def test_a_small_model_without_a_recorded_sample_writes_one_at_export(tmp_path: Path) -> None:
    card, text = exported(tmp_path, [])
    assert card.sample is not None
    assert "drawn at export with max_tokens 60" in card.sample.how
    assert "Drawn at export" in text


@pytest.mark.slow
@pytest.mark.parametrize("format", ["huggingface", "huggingface-code"])
def test_every_exported_folder_holds_a_card_and_may_be_written_again(tmp_path: Path, format: str) -> None:
    bundle = make(tmp_path / "a").bundle
    out = tmp_path / "out"
    for name in ("one", "two"):
        assert main(["export", str(bundle), str(out), "--format", format, "--license", "mit", "--name", name]) == 0
        card = ModelCard.load(out / "README.md")
        assert card.data.license == "mit"
        assert f"# {name}\n" in card.text
        (out / "README.md").write_text("edited")
    if format != "huggingface":
        assert problems_of(out) == []


def test_the_page_of_a_bundle_shows_its_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exported(tmp_path, [json.dumps(record) for record in RECORDS], "--license", "mit", "--name", "Wiki model")
    assert main(["report", str(tmp_path / "bundle")]) == 0
    page = (tmp_path / "bundle.html").read_text()
    for text in ("<h1>Wiki model</h1>", "Evaluation scores", "2.0000", "Drawn in training at step 16", "txl serve",
                 "txl_dist.load", "2026-09-21", "not stated", "License of the training text"):  # fmt: skip
        assert text in page
    assert "License" in capsys.readouterr().out


def test_a_score_of_a_run_that_exploded_stays_readable() -> None:
    score = SCORE.model_copy(update={"loss": 1e300, "ppl": 1e300, "bits_per_byte": 1e200})
    assert max(map(len, score_rows([score])[1])) <= 20
