"""What a path contains: one function distinguishes corpora, runs, checkpoints, bundles and exports by file names
alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from txl_dist.artifacts import TRAINED, ArtifactKind, detect_artifact, list_checkpoints, require
from txl_dist.errors import ConfigError

CORPUS, RUN, CHECKPOINT, BUNDLE, HUGGINGFACE, HUGGINGFACE_CODE, ONNX, NOTHING = ArtifactKind

LAYOUTS: dict[str, tuple[ArtifactKind, list[str]]] = {
    "corpus": (CORPUS, ["index.json", "tokenizer.json", "train-000000.tar"]),
    "run": (RUN, ["config.toml", "metrics.jsonl", "log.txt"]),
    "new run": (RUN, ["config.toml"]),
    "copied records": (RUN, ["metrics.jsonl"]),
    "run without settings": (RUN, ["checkpoints/step_000000004/state.json"]),
    "checkpoint": (CHECKPOINT, ["state.json", "MANIFEST.json", "config.toml", "tokenizer.json", "probe.safetensors"]),
    "checkpoint without state": (CHECKPOINT, ["engine/00000.safetensors", "MANIFEST.json"]),
    "step_000000004": (CHECKPOINT, ["MANIFEST.json"]),
    "bundle": (BUNDLE, ["model.safetensors", "config.json", "train.toml", "MANIFEST.json"]),
    "bundle without manifest": (BUNDLE, ["model.safetensors", "config.json", "train.toml"]),
    "bundle without weights": (BUNDLE, ["config.json", "MANIFEST.json"]),
    "bundle without settings": (BUNDLE, ["model.safetensors", "MANIFEST.json"]),
    "step_000000008": (BUNDLE, ["model.safetensors", "config.json", "train.toml", "MANIFEST.json"]),
    "only a manifest": (NOTHING, ["MANIFEST.json"]),
    "only weights": (NOTHING, ["model.safetensors"]),
    "folders for files": (NOTHING, ["state.json/a", "config.toml/a", "index.json/a", "metrics.jsonl/a"]),
    "run without a file in its checkpoint": (NOTHING, ["checkpoints/step_000000004/a"]),
    "export": (HUGGINGFACE, ["model.safetensors", "config.json", "txl_tokenizer.json"]),
    "theirs": (HUGGINGFACE, ["pytorch_model.bin", "config.json", "vocab.pkl"]),
    "with its code": (HUGGINGFACE_CODE, ["model.safetensors", "config.json", "modeling_txl.py", "MANIFEST.json"]),
    "with its code, saved again": (HUGGINGFACE_CODE, ["model.safetensors", "config.json", "modeling_txl.py"]),
    "graphs": (ONNX, ["token.onnx", "chunk.onnx", "weights.bin", "config.json", "MANIFEST.json"]),
    "graphs without one": (ONNX, ["chunk.onnx", "config.json", "txl_tokenizer.json", "MANIFEST.json"]),
    "settings": (NOTHING, ["a.toml", "config.json"]),
    "empty": (NOTHING, []),
    "unfinished": (NOTHING, ["checkpoints/step_000000004.tmp-ab12/state.json"]),
}


def lay_out(folder: Path, files: list[str]) -> Path:
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_is_what_its_files_say_and_damage_does_not_change_its_kind(name: str, tmp_path: Path) -> None:
    kind, files = LAYOUTS[name]
    assert detect_artifact(lay_out(tmp_path / name, files)) is kind
    assert detect_artifact(str(tmp_path / name) + "/") is kind


def test_a_url_is_a_corpus_and_what_cannot_be_looked_into_is_nothing(tmp_path: Path) -> None:
    assert {detect_artifact(url) for url in ("s3://bucket/corpus", "https://x.org/c", "pipe:cat x")} == {CORPUS}
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    strange = [tmp_path / "fifo", tmp_path / "loop", tmp_path / "file", tmp_path / "missing", "a\0b", "x" * 5000]
    assert {detect_artifact(path) for path in strange} == {NOTHING}


def test_the_kind_of_a_path_is_told_without_torch_or_numpy() -> None:
    code = "import sys, txl_dist.artifacts; print(*{'torch', 'numpy', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def refusal(path: Path | str, *wanted: ArtifactKind, what: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        require(path, *wanted, what=what)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("corpus", "is a corpus, not a run, a checkpoint or a bundle. Train on the corpus with `txl train"),
        (
            "export",
            "is a Hugging Face folder, not a run, a checkpoint or a bundle. Convert the folder to a bundle with "
            "`txl import",
        ),
        ("settings", "is not a run, a checkpoint or a bundle: it has no config.toml (a run), state.json"),
    ],
)
def test_the_wrong_kind_is_named_with_what_one_does_with_it(name: str, remedy: str, tmp_path: Path) -> None:
    assert remedy in refusal(lay_out(tmp_path / name, LAYOUTS[name][1]), *TRAINED)


def test_a_path_beside_the_right_one_is_answered_with_the_right_one(tmp_path: Path) -> None:
    run = lay_out(tmp_path / "runs/first", LAYOUTS["run without settings"][1])
    assert f"contains {run}. Give one" in refusal(tmp_path / "runs", *TRAINED)
    assert f"contains {list_checkpoints(run)[0]}. Give one" in refusal(run / "checkpoints", CHECKPOINT)
    assert f"contains {list_checkpoints(run)[0]}. Give one" not in refusal(run, CHECKPOINT)
    assert f"Did you mean {run}?" in refusal(tmp_path / "runs/frist", *TRAINED)
    assert f"{run} " in refusal(tmp_path / "runs/other", RUN).replace(".", " ")
    corpus = lay_out(tmp_path / "data/x", LAYOUTS["corpus"][1])
    assert f"Name the folder: {corpus}." in refusal(corpus / "index.json", CORPUS, what="--data")
    (tmp_path / "data/.y.prepare").mkdir()
    assert "Repeat the same `txl prepare`" in refusal(tmp_path / "data/y", CORPUS)
    assert refusal(tmp_path / "data/z", CORPUS, what="--data").startswith(f"--data {tmp_path}/data/z does not exist")
