"""The benchmark for a GPU in a rehearsal on a CPU: an error costs its own row, and no other row.

Whole rehearsals are nightly. Each run of all tests runs the cheapest jobs of each section. test_gpu_offline.py
rehearses one section whole and kills its first job.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.benchmarks import gpu, gpu_jobs, gpu_later, gpu_rows, gpu_sections
from tools.benchmarks.gpu_rows import Journal
from tools.benchmarks.trainers import OurTrainer
from txl_dist.train.batch import batch_maker

ROOT = Path(__file__).parents[3]
Rows = dict[str, list[dict[str, Any]]]


def rehearsed(path: Path, *words: str) -> Rows:
    """Rows by section."""
    command = [sys.executable, "-m", "tools.benchmarks.gpu", "--rehearse", "--json", str(path), *words]
    began = time.monotonic()
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590, check=False)
    assert result.returncode == 0, result.stderr
    assert time.monotonic() - began < 580
    return rows_in(path)


def rows_in(path: Path) -> Rows:
    found: Rows = {}
    for entry in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        if "state" not in entry:
            found.setdefault(entry["section"], []).append(entry)
    return found


def wrong(rows: list[dict[str, Any]]) -> list[str]:
    return [row["error"] for row in rows if "error" in row]


CHILD = f"""
import argparse, os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from tools.benchmarks.gpu_rows import Journal
parser = argparse.ArgumentParser()
parser.add_argument("--json", type=Path)
parser.add_argument("--child")
parser.add_argument("--began", type=float)
parser.add_argument("--skip", action="append", default=[])
given = parser.parse_args()
journal = Journal(given.json, section=given.child, began=given.began, skip=given.skip)
if given.child == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if given.child == "hanging":
    time.sleep(600)
if "late" in given.child:
    time.sleep(6)
if given.child == "raising":
    raise ValueError("on purpose")
for job in journal.plans(given.child.split()):
    journal.begins(job)
    if job == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if job == "end":
        sys.exit("last words")
    if job == "hang":
        time.sleep(600)
    journal.row(job, {{}})
    journal.ends(job)
"""
"""A section's process whose jobs are the words of its name, in place of one that imports torch. The sections `killed`,
`hanging` and `raising` begin no job. A section with a job `late` begins its first job after some seconds."""


def rows_of(jobs: str, folder: Path, *, seconds: float, job_s: float) -> list[tuple[str, str]]:
    """(job, error) of each row of a section with these jobs."""
    program, path = folder / "child.py", folder / "gpu.jsonl"
    program.write_text(CHILD, encoding="utf-8")
    journal = Journal(path, section=jobs, began=1.0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gpu, "PROGRAM", (sys.executable, str(program)))
        patched.setattr(sys, "argv", ["gpu.py", "--json", str(path)])
        gpu.run_section(gpu.Section(jobs, seconds, job_s), journal, ends=time.time() + seconds, job_s=job_s)
    return [(row["job"], row.get("error", "")) for row in rows_in(path)[jobs]]


@pytest.mark.slow
def test_a_job_that_kills_its_process_or_ends_or_hangs_costs_its_own_row(tmp_path: Path) -> None:
    found = rows_of("a kill b end c hang d", tmp_path, seconds=300, job_s=4)
    errors = {"kill": "killed by SIGKILL.", "end": "last words", "hang": "took longer than 4 s"}
    assert found == [(job, errors.get(job, "")) for job in ["a", "kill", "b", "end", "c", "hang", "d"]]


@pytest.mark.slow
def test_the_limit_of_a_job_does_not_count_what_the_process_imports_before_its_jobs(tmp_path: Path) -> None:
    found = rows_of("late hang", tmp_path, seconds=300, job_s=4)
    assert found == [("late", ""), ("hang", "took longer than 4 s")]


def test_a_section_that_hangs_is_killed_or_raises_before_its_jobs_costs_one_row_and_the_others_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, path = tmp_path / "child.py", tmp_path / "gpu.jsonl"
    program.write_text(CHILD, encoding="utf-8")
    monkeypatch.setattr(gpu, "PROGRAM", (sys.executable, str(program)))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--json", str(path)])
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    sections = [gpu.Section(name, 1 if name == "hanging" else 100, 90) for name in ("hanging", "killed", "raising")]
    arguments = argparse.Namespace(json=path, seconds=500.0, job_seconds=0.0, commit="")
    assert gpu.measure(arguments, [*sections, gpu.Section("a b", 100, 90)]) == 0
    found = rows_in(path)
    assert list(found) == ["hanging", "killed", "raising", "a b"]
    assert [wrong(found[section.name]) for section in sections] == [
        ["the section's time ended"],
        ["killed by SIGKILL."],
        ["Traceback (most recent call last): ... ValueError: on purpose"],
    ]
    assert [(row["job"], row.get("error")) for row in found["a b"]] == [("a", None), ("b", None)]


@pytest.mark.slow
def test_jobs_that_the_time_does_not_reach_are_rows_that_say_so(tmp_path: Path) -> None:
    found = rows_of("a hang b c", tmp_path, seconds=5, job_s=90)
    assert found == [
        ("a", ""),
        ("hang", "the section's time ended"),
        ("b", "no time was left"),
        ("c", "no time was left"),
    ]


def test_a_job_that_raises_or_cannot_be_done_is_a_row_and_the_others_follow(
    tmp_path: Path,
) -> None:
    def cannot() -> Iterable[dict[str, object]]:
        raise gpu_jobs.Skipped("no GPU")

    jobs = {"first": lambda: [{}], "cannot": cannot, "last": lambda: [{"figure": 1}, {"figure": 2}]}
    journal = Journal(tmp_path / "gpu.jsonl", section="device", began=1.0)
    assert gpu_jobs.work(lambda setting: jobs, gpu_jobs.Setting("cpu", True, {}, "raise"), journal)
    found = [
        {name: row.get(name) for name in ("job", "error", "skipped", "figure")}
        for row in rows_in(journal.path)["device"]
    ]
    assert [tuple(row.values()) for row in found] == [
        ("first", "RuntimeError: on purpose", None, None),
        ("cannot", None, "no GPU", None),
        ("last", None, None, 1),
        ("last", None, None, 2),
    ]


def test_an_error_of_several_lines_keeps_its_first_and_last_line_and_the_log_has_all(tmp_path: Path) -> None:
    def fails() -> Iterable[dict[str, object]]:
        raise ValueError("at 4:8:\n\n    x = tl.dot(a, b)\nshapes do not fit\n")

    journal = Journal(tmp_path / "gpu.jsonl", section="device", began=1.0)
    gpu_jobs.work(lambda setting: {"product": fails}, gpu_jobs.Setting("cpu", True, {}), journal)
    assert wrong(rows_in(journal.path)["device"]) == ["ValueError: at 4:8: ... shapes do not fit"]
    log = (tmp_path / "gpu.jsonl.log").read_text(encoding="utf-8")
    assert "device: product\nTraceback" in log
    assert "x = tl.dot(a, b)" in log


@pytest.mark.parametrize("rehearses", [True, False])
def test_a_rehearsal_skips_what_the_interpreter_cannot_do_with_this_numpy(tmp_path: Path, rehearses: bool) -> None:
    def interprets() -> Iterable[dict[str, object]]:
        raise RuntimeError("TypeError('only 0-dimensional arrays can be converted to Python scalars')")

    journal = Journal(tmp_path / "gpu.jsonl", section="sweep", began=1.0)
    jobs = {"as it is": interprets, "last": lambda: [{"figure": 1}]}
    gpu_jobs.work(lambda setting: jobs, gpu_jobs.Setting("cpu", rehearses, {}), journal)
    first, last = rows_in(journal.path)["sweep"]
    assert ("skipped" in first, "error" in first) == (rehearses, not rehearses)
    assert last["figure"] == 1


def test_the_process_that_counts_the_seconds_does_not_import_torch() -> None:
    program = "import sys, tools.benchmarks.gpu; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_a_process_that_ends_leaves_its_first_and_last_line_and_the_log_has_all(tmp_path: Path) -> None:
    program = tmp_path / "child.py"
    program.write_text("import sys\nsys.exit('first words\\nmore\\nlast words')\n", encoding="utf-8")
    journal = Journal(tmp_path / "gpu.jsonl", section="device", began=1.0)
    journal.explains("earlier", "what was there before")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gpu, "PROGRAM", (sys.executable, str(program)))
        patched.setattr(sys, "argv", ["gpu.py"])
        assert gpu.run_child("device", journal, [], ends=time.time() + 60, job_s=60) == "first words ... last words"
    assert journal.log.read_text(encoding="utf-8").endswith("first words\nmore\nlast words\n")


def test_a_run_says_which_commit_and_which_device_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)  # it would be the signal of this process
    arguments = argparse.Namespace(json=tmp_path / "gpu.jsonl", seconds=10.0)
    for arguments.commit in ("", "0123abcd"):
        gpu.measure(arguments, [])
    asked, given = map(json.loads, arguments.json.read_text(encoding="utf-8").splitlines())
    assert asked["device"] == "GPU 0: NVIDIA H100"
    assert asked["commit"] == gpu.said_by("git", "rev-parse", "HEAD")
    assert given["commit"] == "0123abcd"
    assert gpu.said_by("no-such-program") == "unknown"


def test_a_slow_machine_gives_sections_and_jobs_more_time_in_proportion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[float, float]] = []
    began = time.time()
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    monkeypatch.setattr(gpu, "run_section", lambda *_, ends, job_s: given.append((ends - began, job_s)))
    for seconds in (gpu.CALL_S, 3 * gpu.CALL_S, gpu.CALL_S / 27):
        arguments = argparse.Namespace(json=tmp_path / "gpu.jsonl", seconds=seconds, job_seconds=0.0, commit="")
        gpu.measure(arguments, [gpu.Section("device", 40, 25)])
    assert given == [(pytest.approx(40, abs=10), 25), (pytest.approx(120, abs=10), 75), (pytest.approx(19, abs=10), 25)]


def worked(section: gpu_jobs.Section, path: Path, *, device: str = "cpu") -> list[dict[str, Any]]:
    """Rows of a section whose jobs run in this process."""
    journal = Journal(path, section="here", began=1.0)
    assert gpu_jobs.work(section, gpu_jobs.Setting(device, True, {}), journal)
    return rows_in(path)["here"]


def failing(*_: object, **__: object) -> gpu_later.Child:
    """A run that fails after some output."""
    return gpu_later.Child([sys.executable, "-c", "import sys; print('begins'); sys.exit('in between\\nat the end')"])


def test_a_run_of_the_curves_that_fails_is_an_error_row_and_the_log_has_all_that_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_later, "prepared", lambda *, tiny: tmp_path)
    monkeypatch.setattr(gpu_later, "_start", failing)
    path = tmp_path / "gpu.jsonl"
    rows = worked(gpu_later.curve, path)
    # The first run fails, and then the CPU's run, with which all runs are compared.
    assert [(row.get("run"), row["error"]) for row in rows] == [
        ("fp32 again", "RuntimeError: begins ... at the end"),
        (None, "RuntimeError: begins ... at the end"),
    ]
    log = (tmp_path / "gpu.jsonl.log").read_text(encoding="utf-8")
    assert log.count("Traceback") == log.count("in between") == 2
    # What a section writes to standard error is in the log at once, also if the section is killed.
    assert capfd.readouterr().err.count("begins\nin between\nat the end\n") == 2


def test_a_process_that_says_much_ends_while_nothing_waits_for_it(capfd: pytest.CaptureFixture[str]) -> None:
    child = gpu_later.Child([sys.executable, "-c", "import sys; print('x' * 1_000_000, file=sys.stderr)"])
    assert child.process.wait(timeout=60) == 0
    assert len(child.wait()[1]) == len(capfd.readouterr().err) == 1_000_001


@pytest.mark.parametrize("status", [0, 9])
def test_what_the_sanitizer_finds_is_an_error_row_and_the_log_has_all_of_it(tmp_path: Path, status: int) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\necho COMPUTE-SANITIZER\necho at 0x10 >&2\necho ERROR SUMMARY: many\nexit {status}\n")
    tool.chmod(0o755)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        (row,) = worked(gpu_later.memcheck, tmp_path / "gpu.jsonl", device="cuda")
    assert (row["exit status"], row["words"]) == (status, "ERROR SUMMARY: many")
    if status:
        assert row["error"] == "COMPUTE-SANITIZER ... ERROR SUMMARY: many"
        assert "at 0x10\n" in (tmp_path / "gpu.jsonl.log").read_text(encoding="utf-8")
    else:
        assert "error" not in row


FAILS = """
import pytest
def test_that_fails():
    difference = 3
    assert difference < 2, "too large"
def test_that_passes():
    pass
def test_that_is_skipped():
    pytest.skip("no GPU")
"""


def test_a_test_that_fails_is_an_error_row_and_the_log_has_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "tests/gpu/test_kernels_gpu.py"
    program.parent.mkdir(parents=True)
    program.write_text(FAILS, encoding="utf-8")
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(gpu_sections, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_sections, "FIRST_TESTS", ())
    jobs = gpu_sections.tests(gpu_jobs.Setting("cpu", False, {}))
    failed, passed, skipped = worked(lambda setting: jobs, tmp_path / "gpu.jsonl")
    assert [row["outcome"] for row in (failed, passed, skipped)] == ["failed", "passed", "skipped"]
    assert failed["error"].startswith("def test_that_fails(): ... ")
    assert failed["error"].endswith("AssertionError")
    assert "error" not in passed | skipped
    assert skipped["words"] == "Skipped: no GPU"
    assert "AssertionError: too large" in (tmp_path / "gpu.jsonl.log").read_text(encoding="utf-8")


CHEAPEST = {
    "tools.benchmarks.gpu_sections": [
        ("twins", "softmax"),
        ("twins", "embedding"),
        ("twins", "model"),
        ("twins", "attention, odd"),
        ("steps", "ZeRO-1 fp32 graphed"),
        ("profile", "eager"),
        ("codes", "ours"),
        ("codes", "original TF32"),
    ],
    "tools.benchmarks.gpu_later": [
        ("kernels", "tiny, sdpa"),
        ("memcheck", "attention"),
    ],
}
JOBS = f"""
import importlib, json, os, sys
from pathlib import Path
os.environ |= {{"TRITON_INTERPRET": "1", "DS_ACCELERATOR": "cpu"}}
sys.path.insert(0, {str(ROOT)!r})
import torch
from tools.benchmarks import gpu_sections
from tools.benchmarks.gpu_jobs import Setting, work
from tools.benchmarks.gpu_rows import Journal
torch.set_num_threads(1)
setting = Setting("cpu", True, {{"original": None, "nvidia": None}})
joined = gpu_sections._ranks(setting)
gpu_sections._ranks = lambda setting: joined  # once in a process, and here all sections are in one
for module, wanted in json.loads(sys.argv[2]).items():
    sections = importlib.import_module(module).SECTIONS
    for section in dict.fromkeys(section for section, _ in wanted):
        jobs = sections[section](setting)
        chosen = {{job: jobs[job] for of, job in wanted if of == section}}
        work(lambda setting: chosen, setting, Journal(Path(sys.argv[1]), section=section, began=1.0))
"""


@pytest.mark.slow
def test_jobs_of_each_section_find_what_the_cpu_finds(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    command = [sys.executable, "-c", JOBS, str(path), json.dumps(CHEAPEST)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stderr
    found = rows_in(path)
    assert [(section, job) for section, rows in found.items() for job in dict.fromkeys(row["job"] for row in rows)] == [
        pair for pairs in CHEAPEST.values() for pair in pairs
    ]
    assert wrong([row for rows in found.values() for row in rows]) == []
    errors = [row[name] for row in found["twins"] for name in ("result", "worst gradient", "R") if name in row]
    assert len(errors) == 10
    assert max(errors) < 1e-5
    assert all(row["norms off by"] < 1e-5 for row in found["steps"] if "norms" in row)
    skipped = {
        job: row["skipped"] for rows in found.values() for row in rows if "skipped" in row for job in [row["job"]]
    }
    assert skipped["original TF32"] == "--peer-original was not given"
    assert skipped.keys() == {"original TF32", "attention"}


def test_losses_norms_and_a_step_time_are_known_within_90_seconds_and_all_sections_fit_their_run() -> None:
    names = [section.name for section in gpu.RUNS[1]]
    assert names[:3] == ["device", "steps", "tests"]
    assert sum(section.limit_s for section in gpu.RUNS[1][:2]) <= 90
    for sections in gpu.RUNS.values():
        assert all(section.job_s < section.limit_s for section in sections)
        assert sum(section.limit_s for section in sections) <= gpu.CALL_S


@pytest.mark.nightly
@pytest.mark.slow
def test_the_first_run_is_rehearsed_whole_with_one_job_killed_one_raising_and_one_hanging(tmp_path: Path) -> None:
    faults = ["--break", "device=kill", "--break", "twins=raise", "--break", "engine=hang"]
    found = rehearsed(tmp_path / "gpu.jsonl", *faults, "--job-seconds", "45")
    assert set(found) == {"device", "steps", "tests", "twins", "engine", "profile", "sweep", "codes"}
    assert wrong(found["device"]) == ["killed by SIGKILL."]
    assert wrong(found["twins"]) == ["RuntimeError: on purpose"]
    assert wrong(found["engine"]) == ["took longer than 45 s"]
    assert [wrong(found[name]) for name in ("steps", "tests", "profile", "sweep", "codes")] == [[]] * 5
    # The first job of each was lost, and all the others are there.
    assert [row["job"] for row in found["device"]][1:] == ["copies"] * 2 + ["products"] + ["launches"] * 3
    assert [row["job"] for row in found["twins"]][:3] == ["softmax", "embedding", "model"]
    errors = [row[name] for row in found["twins"] for name in ("result", "worst gradient", "R") if name in row]
    assert len(errors) == 16
    assert max(errors) < 1e-5
    assert [row["job"] for row in found["steps"]] == [f"ZeRO-1 fp32{words}" for words in ("", " graphed") for _ in "ab"]
    others = ["2 fp32", "3 fp32", "0 fp32 graphed", "2 fp32 graphed"]
    assert [row["job"] for row in found["engine"]][1:] == [f"ZeRO-{one}" for one in others for _ in range(2)]
    assert all(row["norms off by"] < 1e-5 for row in found["engine"] if "norms" in row)
    assert [row.get("skipped", "") for row in found["codes"]] == [
        "",
        "",
        "--peer-original was not given",
        "--peer-nvidia was not given",
    ]


@pytest.mark.nightly
@pytest.mark.slow
def test_the_second_and_third_runs_are_rehearsed(tmp_path: Path) -> None:
    found = rehearsed(tmp_path / "second.jsonl", "--run", "2")
    assert [row["job"] for row in found["kernels"]] == [f"tiny, {n}" for n in ("triton", "sdpa", "fused", "plain")]
    assert not wrong(found["kernels"] + found["recipes"])
    found = rehearsed(tmp_path / "third.jsonl", "--run", "3")
    assert found["curve"][-1]["losses off by"] < 1e-4
    (resumed,) = found["resume"]
    assert (resumed["losses alike"], resumed["files alike"]) == (resumed["steps"], resumed["files"])
    assert len(found["memcheck"]) == 1


@pytest.mark.slow
def test_without_a_gpu_each_section_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.benchmarks.gpu", "--only", "device", "--json", str(tmp_path / "gpu.jsonl")]
    variables = {"CUDA_VISIBLE_DEVICES": "", "PATH": ""}
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=100, check=True, env=variables)
    (row,) = rows_in(tmp_path / "gpu.jsonl")["device"]
    assert "--rehearse" in row["error"]


def test_a_row_is_whole_or_not_read(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    journal = Journal(path, section="device", began=1.0, skip=["a"])
    assert journal.plans(["a", "b"]) == ["b"]
    journal.begins("b")
    journal.row("b", {"figure": float("nan")})
    Journal(path, section="device", began=2.0).row("c", {})
    with path.open("a") as file:
        file.write('{"began": 1.0, "section": "dev')
    assert gpu_rows.rows(path, began=1.0) == {"device": [{"job": "b", "figure": None}]}


def test_a_trainer_that_does_not_fit_is_freed_before_fewer_lanes_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, bool]] = []
    first: list[weakref.ref[Any]] = []

    class Trainer:
        def __init__(self) -> None:
            self.cycle = self

    def timed(sizes: gpu_sections.Sizes, code: str, setting: gpu_jobs.Setting) -> dict[str, object]:
        tried.append((sizes.num_lanes, bool(first) and first[0]() is not None))
        if first:
            return {}
        first.append(weakref.ref(Trainer()))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu_sections, "_timed", timed)
    gc.disable()
    try:
        list(gpu_sections.step(gpu_jobs.Setting("cpu", False, {}), "enwik8_base", "ours"))
    finally:
        gc.enable()
    assert tried == [(22, False), (11, False)]


def test_graphed_steps_of_the_comparison_have_the_batches_of_training() -> None:
    section = gpu_sections._small_model(gpu_jobs.Setting("cpu", True, {})).model
    sizes = gpu_sections.Sizes(section, 300, 2, 8, 8)
    eager, graphed = (OurTrainer(sizes, attention="auto", graphed=is_graphed) for is_graphed in (False, True))
    of_training = batch_maker(eager.model, mask_documents=False, for_graphs=True)
    assert graphed.maker == of_training
    assert eager.maker != of_training
