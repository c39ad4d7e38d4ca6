"""The example of symbolic music without MidiTok: made-up ids, prepared, trained, and written by their names."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import txl_dist
from examples.music import MAJOR, is_allowed, made_up
from tests.helpers.launch import txl
from tests.helpers.served import served
from txl_dist.convert.huggingface_tokenizer import library_tokenizer
from txl_dist.inference.language_model import LanguageModel

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.dist, pytest.mark.slow]


def ran(*words: str, cwd: Path) -> str:
    result = txl(*words, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stdout


def music(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / "music.py"), *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page on music has been followed, with few pieces and steps."""
    folder = tmp_path_factory.mktemp("music")
    made = music("made", "--pieces", "60", "--out", "data/music", cwd=folder)
    assert made.returncode == 0, made.stderr
    names = ["--vocab-list", "data/music/names.txt"]
    ran("prepare", "data/music/ids.jsonl", *names, "--out", "data/music/corpus", cwd=folder)
    ran("train", str(ROOT / "examples" / "music.toml"), "--train.max_steps", "12", cwd=folder)
    ran("export", "runs/music", "bundle", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> LanguageModel:
    return txl_dist.load(str(folder / "bundle"))


def test_it_writes_allowed_names_only(folder: Path, model: LanguageModel) -> None:
    written = music("write", "bundle", "--scale", "D", "--max-tokens", "60", cwd=folder)
    assert written.returncode == 0, written.stderr
    words = written.stdout.split()
    assert len(words) == 61
    assert all(is_allowed(word, 2) for word in words)
    pitches = [int(word.removeprefix("Pitch_")) for word in words if word.startswith("Pitch_")]
    assert pitches
    assert {(pitch - 2) % 12 for pitch in pitches} <= {*MAJOR}


def test_ids_of_the_list_are_those_of_the_model(model: LanguageModel) -> None:
    names, pieces = made_up(3)
    assert list(model.tokenizer.symbols[:-1]) == names
    for ids in pieces:
        text = model.decode(ids)
        assert text.split() == [names[i] for i in ids]
        assert [*model.encode(text)] == ids
        assert model.score(text).tolist() == model.score([len(names), *ids]).tolist()


def test_scores_and_the_server_take_names(folder: Path, model: LanguageModel) -> None:
    told = ran("evaluate", "bundle", "--data", "data/music/corpus", "--accuracy", cwd=folder)
    assert "accuracy, %" in told
    assert "no bits per byte" in told
    with served(model) as server:
        allowed = model.encode("Bar_None Pitch_60")
        reply = server.ask(
            "POST", "/v1/completions", {"prompt": "Bar_None", "max_tokens": 9, "allowed_token_ids": allowed}
        )
        assert reply.status == 200, reply.body
        assert {*reply.json["choices"][0]["text"].split()} <= {"Bar_None", "Pitch_60"}


def test_the_library_tokenizer_of_an_export_gives_the_same(model: LanguageModel) -> None:
    assert library_tokenizer(model.tokenizer, begins_documents=False) is not None


@pytest.mark.skipif(importlib.util.find_spec("miditok") is not None, reason="MidiTok is here")
def test_without_miditok_midi_is_refused_with_the_remedy(folder: Path) -> None:
    for words in (["ids", ".", "--out", "x"], ["write", "bundle", "--out", "a.mid"]):
        result = music(*words, cwd=folder)
        assert result.returncode == 1
        assert 'pip install "txl_dist[music]"' in result.stderr
        assert "Traceback" not in result.stderr
