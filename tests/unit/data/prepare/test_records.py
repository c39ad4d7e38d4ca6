"""A record gives its text whatever else it contains. A record without a text is refused with its keys, or skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.prepare.test_sources import read, texts_of
from txl_dist.cli.prompts import prompts_in_lines
from txl_dist.data.prepare.run import prepare_corpus
from txl_dist.errors import ConfigError, DataError
from txl_dist.io.files import parse_record

GOOD = '{"text": "fine"}\n'
INVALID = {
    '{"text": "cut': "not valid JSON",
    '{"other": "x", "id": 5}': "the record has no field 'text' (its fields: 'other', 'id'). Name the field ",
    "{}": "the record has no field 'text' (its fields: none)",
    '{"text": null}': "the field 'text' is null. ",
    '{"text": ["a"]}': "the field 'text' contains a list, not text",
    '{"text": {"a": 1}}': "the field 'text' contains an object, not text",
    '{"text": 5}': "the field 'text' contains a number, not text",
    '{"text": 1.5}': "the field 'text' contains a number, not text",
    '{"text": true}': "the field 'text' contains true or false, not text",
    '["a"]': "found a list, not an object with the field 'text'",
    '"a"': "found a string, not an object with the field 'text'",
    "null": "found null, not an object with the field 'text'",
    '{"text": "a", "text": "b"}': "the field 'text' occurs twice in the record",
    '{"text": "a", "te\\u0078t": null}': "the field 'text' occurs twice in the record",
}


@pytest.mark.parametrize("line", INVALID)
def test_what_a_record_lacks_is_said_with_its_line_and_it_can_be_left_out(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD + line + "\n" + GOOD)
    with pytest.raises(DataError) as caught:
        read([path])
    message = str(caught.value)
    assert f"a.jsonl, line 2: {INVALID[line]}" in message
    assert "--skip-invalid" in message
    assert ("--jsonl-field" in message) == ("no field" in message or ", not text" in message)
    assert [document.damage for document in read([path], skip_invalid=True)] == ["", "invalid", ""]


@pytest.mark.parametrize(
    "value",
    [
        "[" * 100 + "]" * 100,
        '{"a": ' * 300 + "1" + "}" * 300,
        "[" * 100_000 + "]" * 100_000,
        '{"a": [' * 50_000 + '"]}\\"{"' + "]}" * 50_000,
        "9" * 5000,
        "-" + "9" * 50_000,
        "1" * 5000 + ".5e-9",
        "[" + "9" * 5000 + ", NaN, Infinity]",
    ],
    ids=lambda value: f"{value[:12]}...{len(value)}",
)
def test_other_fields_may_be_nested_and_numbers_long_without_limit(tmp_path: Path, value: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"meta": {value}, "text": "one"}}\n{{"text": "two", "meta": {value}}}\n')
    assert texts_of([path]) == ["one", "two"]
    with pytest.raises(DataError, match="line 1: the field 'meta' contains"):
        read([path], field="meta")


@pytest.mark.parametrize("line", ['{"a": ' + "[" * 100_000, '{"a": ' + "[" * 99_999 + "]" * 100_001 + "}", "[" * 9999])
def test_brackets_that_are_not_closed_are_no_json(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD + line + "\n")
    with pytest.raises(DataError, match="line 2: not valid JSON"):
        read([tmp_path / "a.jsonl"])


def test_keys_that_come_twice_elsewhere_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 1, "id": 2, "text": "one", "meta": {"text": 1, "text": 2}}\n')
    assert texts_of([tmp_path / "a.jsonl"]) == ["one"]
    assert parse_record('{"a": 1, "b": {"c": 1, "c": 2}, "a": 3}').repeated == {"a"}


def test_left_out_records_are_counted_and_change_nothing_else(tmp_path: Path) -> None:
    good = [json.dumps({"text": f"document {i}"}) for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(good))
    (tmp_path / "b.jsonl").write_text("\n".join([*good[:9], *INVALID, *good[9:]]))
    settings: dict[str, Any] = {"kind": "byte", "valid_fraction": 0.0, "seed": 3, "num_workers": 1}
    whole = prepare_corpus(tmp_path / "one", inputs=[tmp_path / "a.jsonl"], **settings)
    mended = prepare_corpus(tmp_path / "two", inputs=[tmp_path / "b.jsonl"], skip_invalid=True, **settings)
    assert mended.corpus.statistics["invalid_records_skipped"] == len(INVALID)
    assert any(line.startswith("  invalid records left out") for line in mended.lines())
    assert mended.corpus.splits["train"].text_bytes == whole.corpus.splits["train"].text_bytes
    assert "invalid_records_skipped" not in whole.corpus.statistics


def test_rows_of_parquet_that_are_null_are_refused_or_left_out(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["fine", None, "fine"]}), path)
    with pytest.raises(DataError, match=r"a\.parquet, column 'text', row 2: the value is null\. .*--skip-invalid"):
        read([path])
    assert [document.damage for document in read([path], skip_invalid=True)] == ["", "invalid", ""]


def test_a_corpus_of_invalid_records_only_is_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "x"}\n' * 9)
    with pytest.raises(DataError, match="no text for the train split"):
        prepare_corpus(tmp_path / "out", inputs=[tmp_path / "a.jsonl"], kind="byte", skip_invalid=True)


def prompts(*lines: str) -> list[Any]:
    return [given.text for given in prompts_in_lines(lines, where="p.jsonl")]


def test_a_key_that_is_null_is_absent_of_a_prompt() -> None:
    assert prompts('{"prompt": "a", "tokens": null, "text": null, "finish": null, "sample": null}') == ["a"]
    assert prompts('{"prompt": null, "tokens": [1, 2], "log_probs": null}') == [[1, 2]]
    with pytest.raises(ConfigError, match=r"p\.jsonl, line 2: the line must be an object"):
        prompts('{"prompt": "a"}', '{"prompt": null, "tokens": null}')
    with pytest.raises(ConfigError, match="keys text, which the output would overwrite"):
        prompts('{"prompt": "a", "text": "b"}')


def test_a_prompt_s_record_may_be_nested_but_has_each_key_once() -> None:
    assert prompts('{"prompt": "a", "meta": ' + "[" * 200 + "]" * 200 + "}") == ["a"]
    with pytest.raises(ConfigError, match=r"p\.jsonl, line 1: the record has id, prompt twice"):
        prompts('{"id": 1, "prompt": "a", "id": 2, "prompt": "b"}')
