"""ONNX Runtime computes the same as the bundle, with two graphs and a memory that is passed along."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import ModelCard

from tests.helpers.bundles import SEGMENT_LEN, make
from tests.helpers.models import VARIANTS
from txl_dist.artifacts import ArtifactKind, detect_artifact
from txl_dist.convert.onnx_graphs import TOLERANCE, export_onnx
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.inference.bundle import load_bundle
from txl_dist.inference.language_model import LanguageModel
from txl_dist.io.manifest import problems_of

SOME: dict[str, dict[str, Any]] = {
    "adaptive_div_2_window": {
        **{"cutoffs": (40, 90), "div_value": 2, "tie_projections": (False, True, False)},
        **{"same_length": "memory", "clamp_len": 10},
    },
    "untied_window_and_self": {
        **{"same_length": "memory_and_self", "cutoffs": (40,), "pre_norm": True, "final_norm": True},
        "tie_weights": False,
    },
    "labml_like": {**VARIANTS["labml_like"], "memory_len": 3},
}
"""Each setting that the graphs see, in few exports: one takes ten seconds."""
TEXT = "abcd dcba abba " * 8

ELSEWHERE = """
import json, sys
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("txl_dist", "torch", "onnx", "transformers"):
            raise ImportError(name)
sys.meta_path.insert(0, Nowhere())
import numpy as np
from onnxruntime import InferenceSession

folder, texts = sys.argv[1], json.loads(sys.argv[2])
config = json.load(open(folder + "/config.json"))
token, chunk = (InferenceSession(folder + "/" + config["graphs"][name]["file"]) for name in ("token", "chunk"))

def fresh():
    shape = [1 if size == "rows" else size for size in config["memory_shape"]]
    return np.zeros(shape, np.float32), np.zeros(1, np.int64)

def read(ids, memory, length):
    rows = []
    for start in range(0, len(ids), config["chunk_len"]):
        part = ids[start : start + config["chunk_len"]]
        tokens = np.zeros((1, config["chunk_len"]), np.int64)
        tokens[0, : len(part)] = part
        given = dict(tokens=tokens, memory=memory, length=length, num_tokens=np.array(len(part)))
        log_p, memory, length = chunk.run(None, given)
        rows.append(log_p[0, : len(part)])
    return rows, memory, length

scores, begun = [], []
for ids in texts:
    rows, *_ = read(ids[:-1], *fresh())
    scores.append(np.concatenate(rows)[np.arange(len(ids) - 1), ids[1:]].tolist())
    begun.append(read(ids[:-1], *fresh())[1:])
memory = np.concatenate([one for one, _ in begun], axis=3)  # all rows go on together, each with its own length
length = np.concatenate([one for _, one in begun])
last, made = np.array([ids[-1] for ids in texts]), []
for _ in range(30):
    log_p, memory, length = token.run(None, dict(tokens=last[:, None], memory=memory, length=length))
    last = log_p[:, 0].argmax(-1)
    made.append(last)
print(json.dumps({"scores": scores, "made": np.stack(made, 1).tolist()}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "adaptive_div_2_window",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("labml_like", "untied_window_and_self")),
    ],
)
def test_onnx_runtime_alone_scores_and_generates_as_the_bundle(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    lm = LanguageModel(load_bundle(make(tmp_path / "made", **SOME[name]).bundle))
    assert export_onnx(tmp_path / "graphs", lm.bundle) <= TOLERANCE
    assert detect_artifact(tmp_path / "graphs") is ArtifactKind.ONNX
    assert problems_of(tmp_path / "graphs") == []
    assert ModelCard.load(tmp_path / "graphs" / "README.md").data.pipeline_tag == "text-generation"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "novel.txt").touch()
    with pytest.raises(CheckpointError, match="exists and is not a folder of ONNX graphs"):
        export_onnx(tmp_path / "mine", lm.bundle)
    content = json.loads((tmp_path / "graphs" / "config.json").read_text(encoding="utf-8"))
    texts = [TEXT[: 5 * SEGMENT_LEN + 6], "ab", TEXT[3:40]]  # of more, and of less, than is remembered
    ids = [list(lm.prompt(text).ids) for text in texts]
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path / "graphs"), json.dumps(ids)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    for row, found in zip(ids, said["scores"], strict=True):
        expected = lm.score(row, memory_len=content["memory_len"])
        assert np.abs(np.array(found) - expected.numpy()).max() < TOLERANCE
    for text, made in zip(texts, said["made"], strict=True):
        ours = lm.generate(text, max_tokens=30, temperature=0.0).ids
        assert made[: len(ours)] == ours
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "graphs").glob("*.*")}
    assert sizes["token.onnx"] < 200_000, "weights are not in the graphs"
    for graph in ("token.onnx", "chunk.onnx"):
        assert str(Path.cwd()).encode() not in (tmp_path / "graphs" / graph).read_bytes()


def test_absolute_positions_and_a_missing_package_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = load_bundle(make(tmp_path / "made").bundle)
    absolute = bundle.section.model_copy(update={"positions": "absolute"})
    with pytest.raises(ConfigError, match="absolute positions has no memory"):
        export_onnx(tmp_path / "out", dataclasses.replace(bundle, section=absolute))
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "onnxscript", None)
        patched.setitem(sys.modules, "onnx_ir", None)
        with pytest.raises(ConfigError, match=r'pip install "txl_dist\[onnx\]"'):
            export_onnx(tmp_path / "out", bundle)
