"""`txl generate` as a user calls it: prompts from arguments, files and JSON lines, output for people and programs,
memories."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import txl_dist
from tests.helpers.models import tiny_section
from txl_dist.cli.main import main
from txl_dist.inference.bundle import Package, write_bundle
from txl_dist.inference.language_model import LanguageModel
from txl_dist.inference.probe import probe_of
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.tokenizers.training import train_tokenizer

TEXTS = ["the cat sat on the mat, the dog did not", "caf\u00e9 \u2603 \u65e5\u672c\u8a9e"]
MEMORY_LEN = 12


def made(folder: Path, *, kind: Any = "byte", seed: int = 0, begins: bool = True, **changes: Any) -> Path:
    """A bundle of random weights."""
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(kind, lambda: TEXTS)
    network = TransformerXL(tiny_section(**changes), vocab_size=tokenizer.vocab_size).eval()
    memory_len = MEMORY_LEN if network.section.scheme.uses_memory else 0
    package = Package(
        section=network.section,
        weights=dict(network.named_parameters()),
        tokenizer=tokenizer,
        segment_len=8,
        memory_len=memory_len,
        begins_documents=begins,
        source={},
        probe=probe_of(network, memory_len=memory_len),
    )
    write_bundle(folder, package)
    return folder


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("bundles") / "byte")


@pytest.fixture(scope="module")
def lm(bundle: Path) -> LanguageModel:
    return txl_dist.load(bundle)


class Shell:
    """Calls `txl generate` in a folder of its own; keeps what it says."""

    def __init__(self, bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.bundle, self.capsys, self.monkeypatch = bundle, capsys, monkeypatch

    def __call__(self, *words: str, given: bytes = b"", bundle: Path | None = None) -> str:
        """What it writes to standard output."""
        code, out, err = self.called(words, given=given, bundle=bundle)
        assert code == 0, err
        return out

    def refusal(self, *words: str, given: bytes = b"", bundle: Path | None = None) -> str:
        """The one line by which it refuses, beneath the one that says what begins."""
        code, _, err = self.called(words, given=given, bundle=bundle)
        lines = err.splitlines()
        assert (code, len(lines)) == (2, 2), err
        assert lines[1].startswith("txl generate: error: ")
        return lines[1]

    def called(self, words: tuple[str, ...], *, given: bytes, bundle: Path | None) -> tuple[int, str, str]:
        self.monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given), "utf-8", errors="surrogateescape"))
        self.capsys.readouterr()
        code = main(["generate", str(bundle or self.bundle), "--max-tokens", "9", *words])
        return code, *self.capsys.readouterr()


@pytest.fixture
def shell(bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(bundle, capsys, monkeypatch)


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_text_is_the_same_from_words_a_file_a_pipe_ids_and_python(shell: Shell, lm: LanguageModel) -> None:
    expected = lm.generate("caf\u00e9 the", max_tokens=9).text
    Path("a.txt").write_bytes("\ufeffcaf\u00e9 the".encode())
    ids = [str(i) for i in lm.prompt("caf\u00e9 the").ids]
    end_of_text = lm.decode([int(ids[0])])
    assert shell("--prompt", "caf\u00e9 the") == f"caf\u00e9 the{expected}\n"
    assert shell("--file", "a.txt") == f"caf\u00e9 the{expected}\n"
    assert shell("--file", "-", given="caf\u00e9 the".encode()) == f"caf\u00e9 the{expected}\n"
    assert shell("--tokens", *ids) == f"{end_of_text}caf\u00e9 the{expected}\n"
    assert shell() == shell("--file", "-") == f"{lm.generate('', max_tokens=9).text}\n"


def test_many_prompts_are_told_in_their_order_with_how_each_ended(shell: Shell, lm: LanguageModel) -> None:
    texts = lm.generate_batch(["a", "bc"], max_tokens=9, num_samples=2, seed=4)
    words = ["--prompt", "a", "bc", "--num-samples", "2", "--seed", "4"]
    expected = "".join(
        f"--- prompt {number}, sample {sample}: {text.finish}\n{prompt}{text.text}\n"
        for number, (prompt, both) in enumerate(zip(["a", "bc"], texts, strict=True), start=1)
        for sample, text in enumerate(both, start=1)
    )
    assert shell(*words) == shell(*words, "--batch-size", "1") == expected


def test_json_lines_come_back_with_what_they_held_and_what_was_made(shell: Shell, lm: LanguageModel) -> None:
    lines = ['{"prompt": "the cat", "name": 7}', "", '{"tokens": [5, 6, 7]}', '{"prompt": ""}']
    Path("in.jsonl").write_text("\n".join(lines), encoding="utf-8-sig")
    words = ["--num-samples", "2", "--batch-size", "3", "--log-probs", "2", "--out"]
    shell("--jsonl", "in.jsonl", *words, "out.jsonl")
    assert shell("--jsonl", "-", *words, "-", given="\n".join(lines).encode()) == Path("out.jsonl").read_text()
    found = records(Path("out.jsonl").read_text())
    texts = lm.generate_batch(["the cat", [5, 6, 7], ""], max_tokens=9, num_samples=2, log_probs=2)
    for record, text in zip(found, [text for both in texts for text in both], strict=True):
        assert record["text"] == text.text
        assert record["ids"] == text.ids
        assert record["finish"] == text.finish
        assert record["log_probs"] == pytest.approx(text.log_probs, abs=1e-5)
        assert [[i for i, _ in top] for top in record["top"]] == [[i for i, _ in top] for top in text.top]
    assert [record.get("name") for record in found] == [7, 7, None, None, None, None]
    assert [record["sample"] for record in found] == [0, 1] * 3
    assert found[2]["tokens"] == [5, 6, 7]


def test_a_text_ends_before_a_stop_string_of_several_bytes(shell: Shell, lm: LanguageModel) -> None:
    snowman = [str(i) for i in lm.encode("a\u2603")]
    words = ["--allowed", *snowman, "--max-tokens", "6", "--num-samples", "300", "--batch-size", "300", "--out", "-"]
    whole = records(shell(*words))
    cut = records(shell(*words, "--stop", "\u2603"))
    assert [record["text"] for record in cut] == [record["text"].partition("\u2603")[0] for record in whole]
    stopped = [record for record in cut if record["finish"] == "stop" and "\ufffd" not in record["text"]]
    assert stopped
    for record in stopped:
        assert lm.decode(record["ids"]) == record["text"], "no id of the snowman's first bytes"


def test_a_conversation_goes_on_from_its_file_as_from_its_text(shell: Shell, lm: LanguageModel) -> None:
    shell("--prompt", "the cat sat on", "--max-tokens", "0", "--save-memory", "a.safetensors")
    words = ["--load-memory", "a.safetensors", "--save-memory", "b.safetensors", "--out", "-"]
    (first,) = records(shell(*words, "--prompt", " the"))
    memory = lm.memory("the cat sat on")
    turn = lm.generate(" the", memory=memory, max_tokens=9, keep_memory=True)
    assert first["ids"] == turn.ids
    (second,) = records(shell("--load-memory", "b.safetensors", "--out", "-"))
    assert second["ids"] == lm.generate("", memory=turn.memory, max_tokens=9).ids


def test_a_stop_string_longer_than_the_memory_leaves_what_was_before_it(lm: LanguageModel) -> None:
    whole = lm.generate("the cat", max_tokens=60, allowed=lm.encode("abc"), memory_len=4)
    turn = lm.generate(
        "the cat", max_tokens=60, allowed=lm.encode("abc"), memory_len=4, stop=whole.text[2:22], keep_memory=True
    )
    assert (turn.text, turn.finish) == (whole.text[:2], "stop")
    assert turn.memory is not None
    assert (len(turn.memory), turn.memory.last) == (5, turn.ids[-1])


def test_words_continue_a_prompt_behind_a_blank(shell: Shell, tmp_path: Path) -> None:
    words = made(tmp_path / "words", kind="word")
    said = shell("--prompt", "the cat", "--allowed", "3", "4", bundle=words).removeprefix("the cat")
    assert said.startswith(" ")
    assert not said.startswith("  ")


WRONG_LINES = [
    (b"nonsense", r"-, line 3: the line is not JSON"),
    (b"[" * 100_000, r"-, line 3: the line is not JSON"),
    (b'{"prompt": "a", "x": NaN}', r"-, line 3: the line is not JSON \(Out of range float"),
    (b'{"prompt": "a", "x": 1e999}', r"-, line 3: the line is not JSON \(Out of range float"),
    (b'{"tokens": [1, true]}', r"-, line 3: the line must be an object"),
    (b'["a"]', r"-, line 3: the line must be an object"),
    (b'{"tokens": [1, 70000]}', r"-, line 3: the prompt: 70000 is not an id of this model's vocabulary"),
    (b'{"prompt": "a\\ud800"}', r"-, line 3: the prompt is not valid UTF-8 \(character 1\)"),
    (b'{"prompt": "\xff"}', r"-, line 3: the prompt is not valid UTF-8 \(character 0\)"),
]


@pytest.mark.parametrize(("line", "refusal"), WRONG_LINES, ids=range(len(WRONG_LINES)))
def test_a_wrong_line_is_named_and_what_was_written_before_stays(shell: Shell, line: bytes, refusal: str) -> None:
    words = ["--jsonl", "-", "--batch-size", "1", "--out", "out.jsonl"]
    said = shell.refusal(*words, given=b'{"prompt": "ab"}\n\n' + line + b'\n{"prompt": "c"}\n')
    assert re.search(refusal, said), said
    assert [record["prompt"] for record in records(Path("out.jsonl").read_text())] == ["ab"]


@pytest.mark.parametrize(
    "line",
    [*(f'{{"prompt": "a", "{key}": 1}}' for key in ("text", "ids", "finish", "sample", "log_probs", "top"))],
)
def test_what_a_line_holds_is_not_written_over(shell: Shell, line: str) -> None:
    said = shell.refusal("--jsonl", "-", "--out", "-", given=line.encode())
    assert re.search(r"-, line 1: the record has values under the keys \w+, which the output would overwrite", said), (
        said
    )


def test_texts_in_work_are_finished_before_a_wrong_line_ends_the_command(shell: Shell) -> None:
    given = b'{"prompt": "ab"}\n{"prompt": "c"}\nnonsense\n{"prompt": "d"}\n'
    words = ("--jsonl", "-", "--num-samples", "2", "--out", "out.jsonl")
    assert "line 3: the line is not JSON" in shell.refusal(*words, given=given)
    found = records(Path("out.jsonl").read_text())
    assert [(record["prompt"], len(record["ids"]) > 0) for record in found] == [
        (p, True) for p in ("ab", "ab", "c", "c")
    ]


def test_an_empty_key_is_none_and_two_prompts_are_refused(shell: Shell) -> None:
    (record,) = records(shell("--jsonl", "-", "--out", "-", given=b'{"prompt": null, "tokens": [5, 6]}'))
    assert (record["prompt"], record["tokens"]) == (None, [5, 6])
    for line in (b'{"prompt": "a", "tokens": [5]}', b'{"prompt": null}', b"{}"):
        assert "the line must be an object with" in shell.refusal("--jsonl", "-", given=line)


def test_ends_of_lines_of_a_pipe_are_kept_and_a_mark_of_utf8_is_not(shell: Shell) -> None:
    text = "a\r\nb\rc\n"
    Path("a.txt").write_bytes(text.encode())
    (piped,) = records(shell("--file", "-", "--out", "-", given=b"\xef\xbb\xbf" + text.encode()))
    (read,) = records(shell("--file", "a.txt", "--out", "-"))
    assert piped == read
    assert piped["prompt"] == text
    assert len(records(shell("--jsonl", "-", "--out", "-", given=b'{"prompt":\r "a"}\r\n{"prompt": "b"}\r\n'))) == 2


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["--tokens"], "--tokens was given without an id"),
        (["--prompt"], "--prompt was given without a text"),
        (["--save-memory", "-"], "a memory must be in a file, not in a pipe"),
        (["--load-memory", "-"], "a memory must be in a file, not in a pipe"),
        (["--save-memory", "pipe"], "cannot write pipe: the path is not a file. Name another file with --save-memory."),
        (["--out", "."], "cannot write .: Is a directory. Name another file with --out."),
        (["--save-memory", "nowhere/m"], "cannot write nowhere/m: No such file or directory."),
    ],
)
def test_words_that_ask_for_nothing_are_refused_before_anything_slow(
    shell: Shell, words: list[str], refusal: str
) -> None:
    os.mkfifo("pipe")
    code, _, err = shell.called(tuple(words), given=b"", bundle=None)
    assert (code, len(err.splitlines())) == (2, 1)
    assert refusal in err
    assert not Path("-").exists()


def test_a_device_is_named_and_one_that_is_not_there_refused(shell: Shell, lm: LanguageModel) -> None:
    assert shell("--prompt", "a", "--device", "cpu") == f"a{lm.generate('a', max_tokens=9).text}\n"
    for device in ("banana", "cuda:77", "meta"):
        assert f"device '{device}' cannot be used here" in shell.refusal("--device", device)


def test_prompts_and_settings_that_the_model_cannot_take_are_refused(shell: Shell, tmp_path: Path) -> None:
    assert "70000 is not an id of this model's vocabulary, 0 ... 256" in shell.refusal("--tokens", "3", "70000")
    assert "--allowed: 999 is not an id" in shell.refusal("--allowed", "999")
    assert "is not valid UTF-8 (character 1). Pass the prompt as UTF-8." in shell.refusal("--file", "-", given=b"a\xff")
    assert "keys and values of 1,000,000,001 tokens" in shell.refusal(
        "--memory-len", str(10**12), "--max-tokens", str(10**9)
    )
    full = (
        "cannot write the texts: No space left on device. If the disk is full, free disk space. Otherwise name "
        "another file with --out."
    )
    assert full in shell.refusal("--out", "/dev/full")
    mute = made(tmp_path / "mute", begins=False)
    assert "cannot begin a document. Give a prompt." in shell.refusal(bundle=mute)
    window = made(tmp_path / "window", same_length="memory")
    assert "Choose a --memory-len of 1 or more" in shell.refusal("--memory-len", "0", bundle=window)
    absolute = made(tmp_path / "absolute", positions="absolute")
    assert "has no memory" in shell.refusal("--save-memory", "m", bundle=absolute)
    assert len(shell("--prompt", "ab", bundle=absolute)) > 2


def test_a_memory_that_is_none_is_cut_or_anothers_is_refused(shell: Shell, bundle: Path, tmp_path: Path) -> None:
    shell("--prompt", "the cat", "--save-memory", "m")
    other = made(tmp_path / "other", seed=1)
    assert "m belongs to another model" in shell.refusal("--load-memory", "m", bundle=other)
    Path("cut").write_bytes(Path("m").read_bytes()[:-9])
    assert "cut cannot be read as a memory of a text" in shell.refusal("--load-memory", "cut")
    assert "is not a memory of a text" in shell.refusal("--load-memory", str(bundle / "model.safetensors"))


def test_an_older_output_is_kept_where_the_model_cannot_be_read(shell: Shell, tmp_path: Path) -> None:
    Path("out.jsonl").write_text("precious")
    damaged = made(tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    assert "damaged is damaged: model.safetensors has" in shell.refusal("--out", "out.jsonl", bundle=damaged)
    assert "--allowed: 999 is not an id" in shell.refusal("--allowed", "999", "--out", "out.jsonl")
    assert Path("out.jsonl").read_text() == "precious"


def test_an_older_output_is_left_alone_by_a_prompt_that_is_refused(shell: Shell) -> None:
    Path("out.jsonl").write_text("older\n")
    shell.refusal("--tokens", "99999", "--out", "out.jsonl")
    assert Path("out.jsonl").read_text() == "older\n"


def test_texts_are_not_written_over_a_memory(shell: Shell) -> None:
    shell("--prompt", "the", "--save-memory", "memory")
    before = Path("memory").read_bytes()
    for words in (["--load-memory", "memory", "--out", "memory"], ["--save-memory", "new", "--out", "new"]):
        code, _, err = shell.called(("--prompt", "a", *words), given=b"", bundle=None)
        assert (code, len(err.splitlines())) == (2, 1), "before anything slow"
        assert "is also the file of --load-memory or --save-memory" in err
    assert Path("memory").read_bytes() == before
    shell("--load-memory", "memory", "--prompt", "a", "--save-memory", "memory")
    assert Path("memory").read_bytes() != before
    assert shell("--load-memory", "memory", "--prompt", "b")
