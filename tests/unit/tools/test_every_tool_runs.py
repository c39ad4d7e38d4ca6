"""Every program in tools/ shows its help, and runs to its end at a small size where it needs nothing from outside.

The programs are found by their `if __name__`: a new one needs an entry in SMOKE or in ELSEWHERE.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import Tensor, nn

from tests.helpers.bundles import make

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PROGRAMS = {
    path.relative_to(ROOT / "tools").with_suffix("").as_posix(): path
    for path in sorted((ROOT / "tools").rglob("*.py"))
    if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
}
SMOKE: dict[str, list[str]] = {
    "bench_attention": ["--tiny", "--rounds", "1"],
    "bench_export": ["BUNDLE", "--dtypes", "int8"],
    "check_plan": [],
    "count_code": [],
    "gpu_rows": ["ROWS"],
    "huggingface_ours": ["random", "FOLDER"],
    "model_page": ["--check"],
    "reference_pages": ["--check"],
    "simulate_lanes": ["--lanes", "16", "--ranks", "4", "--shards", "20", "--steps", "50", "--segment-len", "8"],
}
"""Smallest documented size by program. BUNDLE, ROWS and FOLDER are made by the test."""
MADE_OF_RECORDS = "trains runs of minutes, or rewrites tables of the docs; its parts are tested by themselves"
ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(("bench_decode", "bench_eval", "bench_serve", "bench_softmax", "bench_step"), "test_benchmarks.py"),
    "bench_gpu": "test_bench_gpu.py rehearses it on a CPU",
    "count_launches": "test_count_launches.py",
    **dict.fromkeys(("ablation", "anchors", "long_run", "parity", "prediction", "recipes"), MADE_OF_RECORDS),
    **dict.fromkeys(("speedrun", "studies", "paper/t6", "paper/t8", "paper/t9", "paper/t10"), MADE_OF_RECORDS),
    **dict.fromkeys(("bench_allocator", "bench_checkpoint"), "its smallest model has 14 million weights"),
    **dict.fromkeys(("bench_footprint", "measure_ends", "guard"), "starts ranks; its smallest case takes a minute"),
    "bench_logging": "its only model is that of the quickstart, for a minute",
    **dict.fromkeys(("bench_engine", "bench_loader", "bench_prepare", "fuzz"), "has no size that is over in seconds"),
    "books": "needs a clone of other texts",
    "count_graphs": "counts the graphs of a whole recipe",
    "decode_worker": "is started by bench_decode",
    "step_worker": "is started by bench_step",
    "draw_memory": "needs two finished runs",
    "gpu_engine": "rewrites the reference of tests/gpu, half a minute",
    "gpu_later": "needs a CUDA device",
    "huggingface_theirs": "needs transformers 4",
    "original_train": "needs the original authors' code",
}
"""Programs without a run here, and why, or which test runs them."""


def test_every_program_has_one_entry() -> None:
    assert len(PROGRAMS) > 40
    assert sorted([*SMOKE, *ELSEWHERE]) == sorted(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_shows_its_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, since 45 fresh ones would import torch 45 times."""
    path = PROGRAMS[name]
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


@pytest.mark.parametrize("name", SMOKE)
def test_a_program_runs_to_its_end_at_a_small_size(name: str, tmp_path: Path) -> None:
    began = {"began": 1.0, "section": "", "state": "opens", "command": "bench_gpu", "date": "today"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(began) + "\n")
    places = {"ROWS": "rows.jsonl", "FOLDER": "folder"}
    if "BUNDLE" in SMOKE[name]:
        places["BUNDLE"] = str(make(tmp_path / "made").bundle)
    words = [places.get(word, word) for word in SMOKE[name]]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(PROGRAMS[name]), *words]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("original_train", ["--", "--cuda"], "the following arguments are required: DIR, CORPUS"),
        ("original_train", ["nowhere", "corpus", "10", "x"], "invalid int value: 'x'"),
        ("huggingface_theirs", ["work"], "has no TransfoXL any more"),
        ("decode_worker", [], "required: JOB.json"),
        ("step_worker", ["one"], "required: SIZES.json"),
        ("gpu_rows", [], "required: FILE"),
    ],
)
def test_a_wrong_call_is_a_line_of_usage_not_a_traceback(
    name: str, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(PROGRAMS[name]), *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PROGRAMS[name]), run_name="__main__")
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


class StandInLayer(nn.Module):
    """In the place of the authors' layer: the same call, other mathematics."""

    def __init__(self, num_heads: int, width: int, head_width: int, ff_width: int, dropout: float, **_: object) -> None:
        super().__init__()
        self.own = nn.Linear(width, width)

    def forward(
        self, hidden: Tensor, encoding: Tensor, u: Tensor, v: Tensor, *, dec_attn_mask: Tensor, mems: Tensor
    ) -> Tensor:
        assert mems.shape[1:] == hidden.shape[1:], "time first, as the authors have it"
        assert dec_attn_mask.shape[1] == len(mems) + len(hidden) == len(encoding)
        return self.own(hidden) + mems.mean() + u.sum() + v.sum()


def test_attention_is_measured_beside_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_attention

    encode = SimpleNamespace(PositionalEmbedding=lambda width: lambda at: at[:, None, None].expand(-1, 1, width))
    model = SimpleNamespace(RelPartialLearnableDecoderLayer=StandInLayer, **vars(encode))
    monkeypatch.setattr(bench_attention.peers, "original", lambda folder: SimpleNamespace(model=model))
    size = bench_attention.TINY["tiny"]
    variant = bench_attention.build("original", size, Namespace(peer_original="DIR"))
    assert variant.results()["output"].shape == (size.B, size.T, size.model.width)
