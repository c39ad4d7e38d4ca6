"""Every program in tools/ prints its help, and runs to its end at a small size if it needs nothing from outside.

The programs are found by their `if __name__`. A new program needs an entry in SMOKE or in ELSEWHERE.
"""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from argparse import Namespace
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import Tensor, nn

from tests.helpers import forked
from tests.helpers.bundles import make

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PROGRAMS = {
    path.relative_to(ROOT / "tools").with_suffix("").as_posix(): path
    for path in sorted((ROOT / "tools").rglob("*.py"))
    if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
}
SMOKE: dict[str, list[str]] = {
    "experiments/ablation": ["--table", "--csv", "tools/experiments/notebook/ablation.csv"],
    "experiments/anchors": ["--table"],
    "benchmarks/allocator": ["--only", "as it comes", "--size", "1"],
    "benchmarks/attention": ["--tiny", "--rounds", "1"],
    "benchmarks/checkpoint": ["--layers", "1", "--rounds", "1"],
    "benchmarks/deduplication": [
        "TEXT",
        "--documents",
        "40",
        "--megabytes",
        "0.1",
        "--rounds",
        "1",
        "--vocab-size",
        "300",
    ],
    "benchmarks/engine": ["--stages", "1", "--rounds", "1"],
    "benchmarks/export": ["BUNDLE", "--dtypes", "int8"],
    "benchmarks/loader": ["--tokens", "1200000", "--rounds", "1", "--read-mib", "64"],
    "benchmarks/metrics_logging": ["--rounds", "1"],
    "benchmarks/mirroring": ["--layers", "1", "--steps", "4", "--mib", "1", "--rounds", "1", "--runs", "1"],
    "benchmarks/permutation": ["--tiny", "--rounds", "1", "--vocab-sizes", "50", "--lanes", "2"],
    "benchmarks/prepare": ["TEXT", "--rounds", "1", "--megabytes", "0.1", "--vocab-size", "300"],
    "benchmarks/prepare_cluster": ["TEXT", "--megabytes", "0.05", "--parts", "20"],
    "experiments/books": ["BOOKS", "books"],
    "checks/plan": [],
    "checks/count_code": ["--files", "3"],
    "checks/draw": ["--root", "CHECKOUT", "--seed", "1"],
    "checks/names": [],
    "checks/prose": ["--root", "CHECKOUT", "--places"],
    "checks/same_code": ["--before", ".", "--moves", "NO_MOVES", "--folders", "tools"],
    "checks/many_ranks": ["--ranks", "2"],
    "checks/walk": ["--root", "CHECKOUT", "--list"],
    "experiments/clipping": ["--table"],
    "benchmarks/count_graphs": ["--steps", "2"],
    "experiments/draw_memory": ["RUN", "RUN", "--out", "memory.svg"],
    "checks/fuzz": ["--reader", "settings", "--cases", "20"],
    "benchmarks/gpu_engine": ["--tiny", "--json", "tiny.json"],
    "benchmarks/gpu_rows": ["ROWS"],
    "benchmarks/huggingface_ours": ["random", "FOLDER"],
    "experiments/long_run": ["--table"],
    "checks/model_page": ["--check"],
    "experiments/paper/t10": ["--table"],
    "experiments/paper/t6": ["--table"],
    "experiments/paper/t8": ["--size", "paper"],
    "experiments/paper/t9": ["--size", "paper"],
    "experiments/parity": ["--table"],
    "experiments/precisions": ["--table"],
    "experiments/prediction": ["--table"],
    "experiments/quickstart": ["--table"],
    "experiments/recipes": ["--table"],
    "checks/reference_pages": ["--check"],
    "checks/simulate_lanes": ["--lanes", "16", "--ranks", "4", "--shards", "20", "--steps", "50", "--segment-len", "8"],
    "benchmarks/shares": ["--tiny", "--steps", "1", "--attention-dropout", "0.1"],
    "experiments/speedrun": ["--table"],
    "experiments/studies": ["--table"],
    "experiments/xlnet_probe": ["XLNET_BOOKS", "--work", "work", "--seeds", "1", "--tiny"],
}
"""Smallest documented size by program. Words in capitals are files and folders that `make_places` makes."""
ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(
        [f"benchmarks/{name}" for name in ("decode", "evaluation", "serve", "softmax", "step")], "test_benchmarks.py"
    ),
    "benchmarks/footprint": "test_footprint_measured.py",
    "benchmarks/gpu": "test_bench_gpu.py rehearses it on a CPU",
    "benchmarks/count_launches": "test_count_launches.py",
    "benchmarks/decode_worker": "is started by benchmarks/decode",
    "benchmarks/gpu_kernels": "test_gpu_kernels.py",
    "benchmarks/gpu_later": "needs a CUDA device",
    "benchmarks/gpu_wheels": "test_gpu_offline.py",
    "checks/guard": "its smallest part trains twice on two ranks: more than a minute of a core",
    "benchmarks/huggingface_theirs": "needs transformers 4",
    "benchmarks/measure_copies": "its smallest case starts two ranks, each with a process that keeps copies",
    "benchmarks/measure_ends": "its smallest case starts a training by DeepSpeed's launcher: 30 s of a core",
    "benchmarks/measure_recovery": "its smallest case starts a training by DeepSpeed's launcher: 30 s of a core",
    "benchmarks/original_train": "needs the original authors' code",
    "benchmarks/step_worker": "is started by benchmarks/step",
}
"""Programs without a run here, and why, or which test runs them."""
NIGHTLY = ("experiments/xlnet_probe", "experiments/studies", "benchmarks/prepare_cluster")
"""Programs whose smallest size takes long."""


def module_of(name: str) -> str:
    """A program's name as `python -m` takes it."""
    return f"tools.{name.replace('/', '.')}"


def test_every_program_has_one_entry() -> None:
    assert len(PROGRAMS) > 40
    assert sorted([*SMOKE, *ELSEWHERE]) == sorted(PROGRAMS)


def test_every_file_of_tools_has_one_module_name() -> None:
    folders = {path.parent for path in (ROOT / "tools").rglob("*.py")}
    assert [path.name for path in (ROOT / "tools").glob("*.py")] == ["__init__.py"]
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_shows_its_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, since 45 fresh ones would import torch 45 times."""
    monkeypatch.setattr(sys, "argv", [str(PROGRAMS[name]), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module_of(name), run_name="__main__")
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the programs read and write: `--table` writes pages and pictures."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in ("configs", "docs", "tools"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("tests", "txl_dist"):  # they are only read
        (copy / folder).symlink_to(ROOT / folder)
    return copy


def make_places(folder: Path, *, wanted: Collection[str]) -> dict[str, str]:
    """Make the input of a program, and return the paths by their words in SMOKE."""
    places = {
        word: str(folder / word.lower())
        for word in ("BOOKS", "FOLDER", "NO_MOVES", "ROWS", "RUN", "TEXT", "XLNET_BOOKS")
    }
    places["CHECKOUT"] = str(ROOT)
    if "BUNDLE" in wanted:
        places["BUNDLE"] = str(make(folder / "made").bundle)
    if "BOOKS" in wanted:
        for number in range(258):
            book = folder / f"books/author/title {number:03d}.md"
            book.parent.mkdir(parents=True, exist_ok=True)
            book.write_text("word " * (40_000 if number < 24 else 2))
    if "XLNET_BOOKS" in wanted:
        (folder / "xlnet_books/train").mkdir(parents=True)
        books = [
            {"id": f"{author}/{title}", "text": f"{author} {title}, abcde. " * 600}
            for author in "abc"
            for title in "de"
        ]
        (folder / "xlnet_books/train/books.jsonl").write_text("".join(json.dumps(book) + "\n" for book in books))
    if "NO_MOVES" in wanted:
        (folder / "no_moves").write_text("# nothing has moved\n")
    if "ROWS" in wanted:
        began = {"began": 1.0, "section": "", "state": "opens", "command": "gpu.py", "date": "today"}
        (folder / "rows").write_text(json.dumps(began) + "\n")
    if "RUN" in wanted:
        (folder / "run").mkdir()
        rows = [{"kind": "eval", "step": step, "loss": 4.0, "loss_by_position": [4.5, 4.0]} for step in (60, 120)]
        (folder / "run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if "TEXT" in wanted:
        lines = (json.dumps({"text": f"{number} times {number} is a number"}) for number in range(2000))
        (folder / "text").write_text("\n".join(lines) + "\n")
    return places


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in NIGHTLY else []) for name in SMOKE]
)
def test_a_program_runs_to_its_end_at_a_small_size(name: str, checkout: Path, warm_bin: Path, tmp_path: Path) -> None:
    """Forked, with the processes that it starts, since each fresh one would import torch."""
    places = make_places(tmp_path, wanted=SMOKE[name])
    words = [places.get(word, word) for word in SMOKE[name]]
    variables = forked.environment(PYTHONPATH=checkout)
    out, err, stdin = tmp_path / "out.txt", tmp_path / "err.txt", tmp_path / "stdin.txt"
    stdin.write_text("\n")  # the allocator's benchmark makes a step per line
    files: dict[str, Path] = {"stdin": stdin, "out": out, "err": err}
    process = forked.start(
        forked.run_python_as,
        str(warm_bin / "python"),
        "-m",
        module_of(name),
        *words,
        variables=variables,
        cwd=checkout,
        **files,
    )
    process.join(300)
    if process.is_alive():
        process.kill()
        pytest.fail(f"{name} runs for more than 5 minutes")
    assert process.exitcode == 0, err.read_text()[-3000:]
    assert "Traceback" not in err.read_text()
    for page in [*(ROOT / "docs").glob("*.md"), *(ROOT / "tools/experiments/notebook").glob("*.md")]:
        copy = checkout / page.relative_to(ROOT)
        assert copy.read_bytes() == page.read_bytes(), "the page is not that of the records"


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("benchmarks/original_train", ["--", "--cuda"], "the following arguments are required: DIR, CORPUS"),
        ("benchmarks/original_train", ["nowhere", "corpus", "10", "x"], "invalid int value: 'x'"),
        ("benchmarks/huggingface_theirs", ["work"], "does not contain TransfoXL"),
        ("benchmarks/decode_worker", [], "required: JOB.json"),
        ("benchmarks/step_worker", ["one"], "required: SIZES.json"),
        ("benchmarks/gpu_rows", [], "required: FILE"),
        ("benchmarks/loader", ["--tokens", "200000"], "--tokens 200,000 is too few: the smallest corpus has 1,181,952"),
        ("benchmarks/loader", ["--rounds", "0"], "--rounds 0 measures nothing: type --rounds 1 or more"),
        ("benchmarks/loader", ["--read-mib", "-1"], "--read-mib -1 reads nothing: type --read-mib 1 or more"),
        ("benchmarks/prepare", ["texts.jsonl", "--rounds", "0"], "--rounds: 0 is not a whole number of 1 or more"),
        ("benchmarks/engine", ["--rounds", "one"], "--rounds: one is not a whole number of 1 or more"),
        ("benchmarks/engine", ["--stages", "4"], "--stages: invalid choice: 4"),
        ("benchmarks/allocator", ["--rounds", "0"], "--rounds 0 measures nothing: type --rounds 1 or more"),
        ("benchmarks/checkpoint", ["--layers", "0"], "--layers: 0 is not a whole number of 1 or more"),
        ("benchmarks/count_graphs", ["--steps", "-2"], "--steps: -2 is not a whole number of 1 or more"),
        ("benchmarks/gpu_engine", ["--tiny"], "--tiny does not make the reference: name another file with --json FILE"),
        ("benchmarks/measure_copies", ["--steps", "0"], "--steps: 0 is not a whole number of 1 or more"),
        ("benchmarks/measure_ends", ["--cases", "fire"], "--cases: invalid choice: 'fire'"),
        ("benchmarks/measure_recovery", ["--ranks", "1"], "--ranks must be at least 2: one rank is never struck"),
        ("benchmarks/measure_recovery", ["--strikes", "121"], "after 120 losses within an hour: type --strikes 120 or"),
        ("benchmarks/measure_recovery", ["--strikes", "61", "--what", "kill", "again"], "type --strikes 60 or fewer"),
        ("benchmarks/measure_recovery", ["--minutes", "90", "--every", "20"], "type --every 30 or more"),
    ],
)
def test_a_wrong_call_is_a_line_of_usage_not_a_traceback(
    name: str, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(PROGRAMS[name]), *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module_of(name), run_name="__main__")
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_recovery_names_the_losses_of_ranks_that_were_not_struck_once() -> None:
    from tools.benchmarks.measure_recovery import not_struck

    struck, hung = "rank 1 on a (pid 12) was lost: SIGKILL", "rank 0 on a (pid 1) was lost: hung"
    assert not_struck([struck, hung, hung], [12, 2]) == [hung]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"Plain text.\n", "line 1: not a JSON object with a text"),
        (b'{"text": "one"}\n\n{"text": "two"\n', "line 3: not a JSON object with a text"),
        (b'{"body": "one"}\n', "line 1: not a JSON object with a text"),
        (b'{"text": null}\n', "line 1: not a JSON object with a text"),
        (b'["one", "two"]\n', "line 1: not a JSON object with a text"),
        (b'{"text": "\xff"}\n', "cannot be read: 'utf-8' codec can't decode byte 0xff"),
        (b'{"text": "one"}\n', "documents in the files: 1. Type files with two or more"),
        (b"", "documents in the files: 0."),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_prepare_names_the_line_that_is_no_record(
    content: bytes | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "texts").write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(tmp_path / "texts")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("tools.benchmarks.prepare", run_name="__main__")
    assert str(ended.value.code).startswith("prepare: ")
    assert said in str(ended.value.code)
    assert "\n" not in str(ended.value.code)


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
    from tools.benchmarks import attention

    encode = SimpleNamespace(PositionalEmbedding=lambda width: lambda at: at[:, None, None].expand(-1, 1, width))
    model = SimpleNamespace(RelPartialLearnableDecoderLayer=StandInLayer, **vars(encode))
    monkeypatch.setattr(attention.peers, "original", lambda folder: SimpleNamespace(model=model))
    size = attention.TINY["tiny"]
    variant = attention.build("original", size, Namespace(peer_original="DIR"))
    assert variant.results()["output"].shape == (size.B, size.T, size.model.width)
