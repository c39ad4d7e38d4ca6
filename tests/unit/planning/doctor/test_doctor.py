"""Findings of `txl doctor` on artificial machines: every problem can be found, and a healthy machine has none."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.corpora import tiny_corpus
from tests.helpers.launch import txl
from txl_dist.planning.doctor import disk as disk_module
from txl_dist.planning.doctor import machine
from txl_dist.planning.doctor.checks import Finding, differences, judge, judge_reduce
from txl_dist.planning.doctor.disk import CorpusShards, Disk, try_corpus, try_disk
from txl_dist.planning.doctor.doctor import Report
from txl_dist.planning.doctor.fabric import Reduce
from txl_dist.planning.doctor.machine import Device, Facts, gather_facts
from txl_dist.train.engine.precision import Bf16Support
from txl_dist.train.footprint import room

H100 = Device("NVIDIA H100 80GB HBM3", 79.0, 78.5, (9, 0), True, 989.4)
DISK = Disk(folder="/runs", kind="ext4", free_gib=900.0, renames=True, locks=True)
HEALTHY = Facts(
    host="a",
    python="3.12.1",
    versions={"txl_dist": "0.1.0", "torch": "2.13.0", "deepspeed": "0.19.8"},
    unmet=(),
    torch_cuda="13.0",
    driver="580.1",
    num_driver_gpus=2,
    devices=(H100, H100),
    backends={"gloo": "", "nccl": "2.30"},
    num_cores=32,
    cgroup_cores=0.0,
    num_local_ranks=2,
    memory_gib=256.0,
    room_gib=250.0,
    shm_gib=128.0,
    shm_free_gib=128.0,
    max_files=65536,
    max_pinned=-1,
    has_infiniband=True,
    interfaces={"eth0": "10.0.0.1"},
    host_address="10.0.0.1",
    environment={},
    broken_launcher_files=(),
    programs=("deepspeed", "pdsh", "ssh"),
    missing_compiler_reason="",
    cpu_bf16=Bf16Support(False, "the processor has neither AMX nor AVX-512 BF16"),
    disk=DISK,
    corpus=CorpusShards(location="/data", tokens=10**9),
)


def changed(**changes: Any) -> Facts:
    return dataclasses.replace(HEALTHY, **changes)


def gpu(**changes: Any) -> Facts:
    return changed(devices=(H100, H100._replace(**changes)))


def no_gpu(**changes: Any) -> Facts:
    return changed(devices=(), **changes)


def on_disk(**changes: Any) -> Facts:
    return changed(disk=dataclasses.replace(DISK, **changes))


def variable(name: str, value: str) -> Facts:
    return changed(environment={name: value})


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_a_healthy_machine_has_no_complaint(is_cut_off: bool) -> None:
    findings = judge(HEALTHY, is_cut_off=is_cut_off)
    assert [finding for finding in findings if finding.verdict != "ok"] == []
    assert len(findings) > 11
    assert all(finding.found for finding in findings)


@pytest.mark.parametrize(
    ("name", "value"),
    [("GLOO_SOCKET_IFNAME", "eth0"), ("NCCL_SOCKET_IFNAME", "eth"), ("NCCL_SOCKET_IFNAME", "^docker0")],
)
def test_interfaces_that_are_up_may_be_named(name: str, value: str) -> None:
    assert {finding.verdict for finding in judge(variable(name, value))} == {"ok"}


def test_a_machine_without_gpus_is_healthy_too() -> None:
    facts = no_gpu(num_driver_gpus=0, driver="", torch_cuda="", backends={"gloo": ""})
    assert {finding.verdict for finding in judge(facts)} == {"ok"}


@pytest.mark.parametrize(
    ("facts", "name", "verdict", "words"),
    [
        (changed(unmet=("torch>=2.10 (is 2.9.1)",)), "versions", "problem", "torch>=2.10 (is 2.9.1)"),
        (gpu(has_code=False), "GPU 1", "problem", "has no code for the GPU"),
        (gpu(free_gib=20.0), "GPU 1", "warning", "20.0 of 79.0 GiB free"),
        (gpu(capability=(7, 0)), "GPU 1", "warning", "emulates bf16"),
        (gpu(peak_tflops=0.0), "GPU 1", "warning", "peak not known"),
        (no_gpu(torch_cuda=""), "GPU", "problem", "build of torch with CUDA"),
        (no_gpu(), "GPU", "problem", "driver to one for CUDA 13.0"),
        (no_gpu(environment={"CUDA_VISIBLE_DEVICES": ""}), "GPU", "warning", "CUDA_VISIBLE_DEVICES=''"),
        (no_gpu(environment={"DS_ACCELERATOR": "cpu"}), "GPU", "warning", "DS_ACCELERATOR='cpu'"),
        (changed(backends={"gloo": ""}), "backends", "problem", "nccl"),
        (changed(backends={}), "backends", "problem", "gloo and nccl"),
        (changed(num_cores=1), "cores", "warning", "1 core"),
        (changed(cgroup_cores=4.0), "cores", "warning", "control group allows 4"),
        (variable("OMP_NUM_THREADS", "64"), "cores", "warning", "32 cores for 2 ranks, OMP_NUM_THREADS=64"),
        (variable("OMP_NUM_THREADS", "many"), "cores", "problem", "OMP_NUM_THREADS=many"),
        (changed(room_gib=2.0), "memory", "problem", "2.0 of 256.0 GiB are available to processes"),
        (changed(shm_gib=0.06, shm_free_gib=0.06), "/dev/shm", "problem", "0.06 of 0.06"),
        (changed(shm_free_gib=10.0), "/dev/shm", "warning", "10.00 of 128.00"),
        (changed(max_files=100), "open files", "problem", "at most 100"),
        (changed(max_files=1024), "open files", "warning", "at most 1024"),
        (changed(max_pinned=8 << 20), "pinned memory", "problem", "at most 8"),
        (variable("TXL_FAILPOINTS", "kill:0:3"), "TXL_FAILPOINTS", "problem", "on purpose"),
        (variable("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1"), "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "problem", "runs code"),
        (
            variable("GLOO_SOCKET_IFNAME", "eth"),
            "GLOO_SOCKET_IFNAME",
            "problem",
            "names eth, which is not an active interface",
        ),
        (
            variable("NCCL_SOCKET_IFNAME", "=ib,eth0"),
            "NCCL_SOCKET_IFNAME",
            "problem",
            "names ib, which is not an active interface",
        ),
        (
            changed(broken_launcher_files=("/root/.deepspeed_env",)),
            ".deepspeed_env",
            "problem",
            "without an equals sign",
        ),
        (on_disk(error="Permission denied"), "disk", "problem", "Permission denied"),
        (on_disk(free_gib=0.5), "disk", "problem", "0.5 GiB"),
        (on_disk(free_gib=10.0), "disk", "warning", "10.0 GiB"),
        (on_disk(renames=False), "disk", "problem", "no renaming"),
        (on_disk(kind="tmpfs"), "disk", "warning", "files in memory are lost"),
        (on_disk(locks=False), "disk", "warning", "no file locking"),
        (changed(corpus=CorpusShards(location="/d", error="no index.json")), "corpus", "problem", "no index.json"),
        (changed(missing_compiler_reason="Triton needs Python.h"), "compiler", "problem", "Triton needs Python.h"),
        (changed(programs=()), "launcher", "warning", "the program deepspeed is not on PATH"),
    ],
)
def test_what_is_wrong_is_found_and_nothing_else(facts: Facts, name: str, verdict: str, words: str) -> None:
    complaints = [finding for finding in judge(facts) if finding.verdict != "ok"]
    assert [(finding.name, finding.verdict) for finding in complaints] == [(name, verdict)]
    assert words in complaints[0].found + complaints[0].remedy
    assert complaints[0].remedy.endswith(".")


def test_a_launcher_that_has_started_this_is_not_missed_on_path() -> None:
    assert {finding.verdict for finding in judge(changed(programs=(), environment={"RANK": "0"}))} == {"ok"}


def test_a_host_name_that_leads_nowhere_is_a_problem_where_the_ranks_of_several_nodes_do_not_meet() -> None:
    local = changed(host_address="127.0.1.1")
    assert {finding.verdict for finding in judge(local)} == {"ok"}
    (problem,) = [finding for finding in judge(local, is_cut_off=True) if finding.verdict == "problem"]
    assert (problem.name, "eth0 10.0.0.1" in problem.found) == ("host name", True)
    named = dataclasses.replace(local, environment={"GLOO_SOCKET_IFNAME": "eth0"})
    assert {finding.verdict for finding in judge(named, is_cut_off=True)} == {"ok"}


@pytest.mark.parametrize(
    ("other", "verdict", "words"),
    [
        (changed(python="3.11.2"), "problem", "Python: 3.12.1 on a, c; 3.11.2 on b"),
        (changed(versions=HEALTHY.versions | {"torch": "2.12.0"}), "problem", "torch: 2.13.0 on a, c; 2.12.0 on b"),
        (changed(versions={"torch": "2.13.0", "txl_dist": "0.1.0"}), "problem", "deepspeed: 0.19.8 on a, c; none on b"),
        (changed(torch_cuda="12.8"), "problem", "CUDA of torch: 13.0 on a, c; 12.8 on b"),
        (changed(driver="570.2"), "warning", "driver: 580.1 on a, c; 570.2 on b"),
        (changed(devices=(H100,)), "warning", "GPUs: "),
        (changed(num_local_ranks=1), "warning", "ranks: 2 on a, c; 1 on b"),
    ],
)
def test_a_node_that_differs_is_named(other: Facts, verdict: str, words: str) -> None:
    found = list(differences({"a": HEALTHY, "b": other, "c": HEALTHY}))
    assert [one.verdict for one in found] == [verdict]
    assert found[0].found.startswith(words)


def test_without_gpus_the_choice_of_engine_precision_auto_is_said_and_compared() -> None:
    fast = Bf16Support(True, "AMX, products 4.0 times as fast as in fp32")
    nodes = {
        "a": no_gpu(num_driver_gpus=0),
        "b": no_gpu(num_driver_gpus=0, cpu_bf16=fast),
    }
    found = [finding.found for facts in nodes.values() for finding in judge(facts) if finding.name == "GPU"]
    begin = "none, so runs use the CPU. engine.precision=auto is"
    assert found[0] == f"{begin} fp32 (the processor has neither AMX nor AVX-512 BF16)"
    assert found[1] == f"{begin} bf16 (AMX, products 4.0 times as fast as in fp32)"
    (difference,) = differences(nodes)
    assert (difference.verdict, difference.found) == ("warning", "bf16 of the CPU: slow on a; fast on b")


def test_equal_nodes_do_not_differ() -> None:
    assert [one.verdict for one in differences({"a": HEALTHY, "b": HEALTHY})] == ["ok"]


@pytest.mark.parametrize(
    ("best", "num_nodes", "on_gpu", "verdict"),
    [
        (300.0, 1, True, "ok"),
        (2.0, 1, True, "warning"),
        (0.5, 2, True, "warning"),
        (0.5, 2, False, "ok"),
        (0.01, 2, False, "warning"),
    ],
)
def test_slow_all_reduces_are_seen(best: float, num_nodes: int, on_gpu: bool, verdict: str) -> None:
    figures = [Reduce(4096, 0.1, best / 9), Reduce(2**20, 0.2, best)]
    assert judge_reduce(figures, num_nodes=num_nodes, on_gpu=on_gpu).verdict == verdict


def test_trying_a_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    found = try_disk(tmp_path / "not" / "there")
    assert found.folder == str(tmp_path)
    assert found.error == ""
    assert found.renames
    assert found.locks
    assert found.free_gib > 0
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_is_a_finding_and_no_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_module, "_renames", refuse)
    assert try_disk(tmp_path).error == "No space left on device"
    assert list(tmp_path.iterdir()) == []


def test_a_corpus_is_opened(tmp_path: Path) -> None:
    found = try_corpus(str(tiny_corpus(tmp_path).folder))
    assert found.error == ""
    assert found.tokens > 0
    assert "missing" in try_corpus(str(tmp_path / "missing")).error


def test_the_tightest_control_group_counts_in_both_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "of_process": "3:cpu:/\n0::/a/b",
        "a/cpu.max": "150000 100000",
        "a/b/cpu.max": "max 100000",
        "cpu/cpu.cfs_quota_us": "200000",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(room, "GROUPS", tmp_path)
    monkeypatch.setattr(room, "OF_PROCESS", tmp_path / "of_process")
    assert machine._cgroup_cores() == 1.5
    (tmp_path / "a" / "cpu.max").unlink()
    assert machine._cgroup_cores() == 2.0


def test_a_requirement_that_is_not_met_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(machine._unmet()) == []
    monkeypatch.setattr(
        machine.importlib.metadata, "requires", lambda name: ["numpy>=99", "torch", 'nope; extra == "x"']
    )
    (line,) = machine._unmet()
    assert line.startswith("numpy>=99 (is ")


def test_values_of_variables_that_it_has_nothing_to_say_of_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_SDK_KEY", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = gather_facts(run_dir=tmp_path).environment
    assert "LD_SDK_KEY" not in found
    assert found["OMP_NUM_THREADS"] == "1"


def test_facts_are_gathered_here_and_can_be_written_as_json(tmp_path: Path) -> None:
    facts = gather_facts(run_dir=tmp_path)
    assert facts.num_cores >= 1
    assert facts.memory_gib > 0
    assert "torch" in facts.versions
    assert "lo" not in facts.interfaces
    report = Report({facts.host: facts}, {facts.host: judge(facts)}, [])
    assert json.loads(json.dumps(dataclasses.asdict(report)))["nodes"][facts.host]["host"] == facts.host


def test_a_line_begins_with_the_verdict_and_ends_with_the_remedy() -> None:
    findings = {"a": [Finding("x", "ok", "fine")], "longer": [Finding("y", "problem", "bad", "Mend it.")]}
    assert Report({"a": HEALTHY, "longer": HEALTHY}, findings, []).lines() == [
        "ok       a       x  fine",
        "problem  longer  y  bad -> Mend it.",
        "2 checks on 2 nodes: 1 problem, 0 warnings",
    ]


def test_the_command_exits_with_1_if_there_is_a_problem(tmp_path: Path) -> None:
    result = txl("doctor", "--run-dir", "runs", "--data", "nowhere", "--json", "d.json", cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("problem")]
    assert "corpus" in line
    (findings,) = json.loads((tmp_path / "d.json").read_text())["findings"].values()
    assert [one["name"] for one in findings if one["verdict"] == "problem"] == ["corpus"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.json"]
