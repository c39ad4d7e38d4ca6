"""Recovery on simulated nodes under real launchers: nodes lose their power, or their network in one or both directions.

Each node has one rank, or is a spare. `tests/chaos` has the cases in which only a rank is lost. The nightly cases print
how long the recoveries took. A run counts its steps in metrics.jsonl, so a process that writes on after its rank was
given away would show up there as a step that comes twice.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.helpers.cluster import CLUSTER, losses, processes, why_not
from tests.helpers.corpora import random_texts, tiny_corpus
from tests.helpers.forked import ENVIRONMENT
from tests.helpers.job import Job
from tests.helpers.launch import wait_for
from txl_dist.artifacts import checkpoint_folder, list_checkpoints
from txl_dist.train.checkpoint.memories import load_lane_memory
from txl_dist.train.checkpoint.validate import checkpoint_problems

NUM_STEPS = 300
SETTINGS = f"""
[data]
path = "corpus"
[model]
num_layers = 2
width = 32
num_heads = 2
head_width = 16
ff_width = 48
cutoffs = []
dropout = 0.0
[optim]
lr = 3e-3
[train]
num_lanes = 6
segment_len = 16
memory_len = 32
microbatch_lanes = 1
max_steps = {NUM_STEPS}
[eval]
max_tokens = 64
[checkpoint]
every_steps = 10
keep_last = 1000
[metrics]
log_every_steps = 1
tensorboard = false
[recover]
spares = 1
copies = "partner"
silent_s = 5.0
"""
VARIABLES = ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "eth0"}
SPARE_NODE = ("--recover.spare_nodes", "1")
SHRINK = ("--recover.on_loss", "shrink")
SSH_FAILED = 255
"""Exit code of pdsh, and so of plain `deepspeed`, after the ssh of a node has ended."""

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


class Nodes:
    """Three nodes, and a run on them."""

    def __init__(self, folder: Path, *, slots: int = 1) -> None:
        self.folder = folder
        self.run = folder / "run"
        self._cluster = folder / "cluster"
        self._started: list[subprocess.Popen[bytes]] = []
        tiny_corpus(folder, texts=random_texts(count=300, longest=400))
        (folder / "tiny.toml").write_text(SETTINGS, encoding="utf-8")
        (folder / "environment").write_text("", encoding="utf-8")
        self.script("up", "3", str(self._cluster), SLOTS=str(slots))

    def script(self, *words: str, **variables: str) -> None:
        subprocess.run([CLUSTER, *words], env=os.environ | variables, check=True, timeout=120)

    def change(self, what: str, node: str, *words: str) -> None:
        """Cut, restore or kill a node."""
        print(f"{time.strftime('%X')} {what} {node} {' '.join(words)} after step {max(losses(self.run))}", flush=True)
        self.script(what, str(self._cluster), node, *words)

    def on(self, node: str, *words: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a command on a node. Its output is added to the log."""
        command = [CLUSTER, "exec", str(self._cluster), node, *words]
        environment = os.environ | VARIABLES | variables
        with (self.folder / "log").open("a") as log:
            process = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log)
        self._started.append(process)
        return process

    def launch(self, *settings: str, program: str = "txl", fault: str = "") -> subprocess.Popen[bytes]:
        """Start the run on all nodes, from the first one, with `txl launch` or with plain `deepspeed`."""
        shared = VARIABLES | {"TXL_FAILPOINTS": fault}
        names = ("OMP_NUM_THREADS", "DS_ACCELERATOR", "GLOO_SOCKET_IFNAME", "TXL_FAILPOINTS")
        (self.folder / "environment").write_text("".join(f"{name}={shared[name]}\n" for name in names))
        flags = ("--hostfile", str(self._cluster / "hostfile"), "--master_addr", "node1", "--no_ssh_check")
        words = ("txl", "launch", *flags)
        if program == "deepspeed":
            words = ("deepspeed", *flags, "--module", "txl_dist", "train")
        keep_alive = {"PDSH_SSH_ARGS_APPEND": "-o ServerAliveInterval=5 -o ServerAliveCountMax=3"}
        more = {"DS_ENV_FILE": str(self.folder / "environment"), **(keep_alive if program == "deepspeed" else {})}
        return self.on("node1", *words, "tiny.toml", "--run.dir", "run", *settings, **more)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    def wait_for_step(self, step: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until the run has made a step."""
        metrics = self.run / "metrics.jsonl"
        try:
            wait_for(
                lambda: metrics.exists() and max(losses(self.run), default=0) >= step,
                process=process,  # type: ignore[arg-type]
                timeout_s=400,
            )
        except AssertionError as error:
            raise AssertionError(f"no step {step}: {error}\n{self.log[-6000:]}") from error

    def wait_for_text(self, text: str) -> None:
        """Wait until the log has a text."""
        wait_for(lambda: text in self.log, timeout_s=300)

    def end(self, process: subprocess.Popen[bytes], *, timeout_s: float = 500) -> int:
        """Wait for the end of a command, and return its exit code."""
        try:
            return process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still runs:\n{self.log[-6000:]}") from None

    def processes(self, node: str) -> dict[int, float]:
        """The agents, ranks and spares on a node: time of the start by pid."""
        found = {}
        for pid, words in processes(self._cluster, node).items():
            if "tiny.toml" in " ".join(words) and "txl_dist" in " ".join(words[:5]):
                with suppress(psutil.Error):
                    found[pid] = psutil.Process(pid).create_time()
        return found

    def kill_process(self, node: str, name: str) -> None:
        """Kill the process of this name on a node."""
        (victim,) = (pid for pid in processes(self._cluster, node) if psutil.Process(pid).name() == name)
        os.kill(victim, signal.SIGKILL)

    def wait_for_spare(self, node: str) -> None:
        """Wait until a spare node has joined the job, and its spare has imported everything."""
        self.wait_for_text("has joined the job")

        def is_ready() -> bool:
            newest = max(self.processes(node), default=0)
            with suppress(OSError):  # it is connected to its agent by a socket
                return any(os.readlink(path).startswith("socket:") for path in Path(f"/proc/{newest}/fd").iterdir())
            return False

        wait_for(is_ready, timeout_s=300)

    def records(self, kind: str, event: str = "") -> list[dict[str, Any]]:
        lines = (self.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        return [record for record in records if record["kind"] == kind and record.get("event", "") == event]

    def down(self) -> None:
        self.script("down", str(self._cluster))
        for process in self._started:
            process.wait(timeout=60)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.down()


def unbroken(nodes: Nodes, *, ranks: int) -> dict[int, float]:
    """Losses of the same run on this machine, to which nothing happens."""
    words = ("train", "tiny.toml", "--run.dir", "whole", "--recover.copies", "node")
    with Job(*words, log=nodes.folder / "whole.log", ranks=ranks, cwd=nodes.folder) as job:
        assert job.wait(limit_s=400) == [0] * ranks, job.text[-4000:]
    return losses(nodes.folder / "whole")


def assert_written_by_one(nodes: Nodes, *, steps_again: int = 0) -> None:
    """Each step was recorded once, in order, but for `steps_again` steps, and each checkpoint is whole."""
    steps = [record["step"] for record in nodes.records("train")]
    assert len(steps) == NUM_STEPS + steps_again, steps
    assert sum(after <= before for before, after in itertools.pairwise(steps)) == bool(steps_again), steps
    assert (nodes.run / "DONE").read_text() == f"{NUM_STEPS}\n"
    for checkpoint in list_checkpoints(nodes.run):
        assert checkpoint_problems(checkpoint) == []


def assert_near(nodes: Nodes, *, ranks: int) -> None:
    """The losses are those of a run with all ranks, up to rounding."""
    seen, wanted = losses(nodes.run), unbroken(nodes, ranks=ranks)
    worst = max(abs(seen[step] / wanted[step] - 1) for step in wanted)
    print(f"a loss differs by {worst:.2g}, relative")
    assert seen.keys() == wanted.keys()
    assert worst <= 1e-6


def memory_goes_on(nodes: Nodes, step: int) -> bool:
    """Whether the memory after the step that follows still holds, bit for bit, what it held after this step."""
    before, after = (
        load_lane_memory(checkpoint_folder(nodes.run, number), lanes=range(6)) for number in (step, step + 1)
    )
    kept_before, kept_after = torch.stack(before.hidden)[:, :, 16:], torch.stack(after.hidden)[:, :, :-16]
    return kept_before.numel() > 0 and torch.equal(kept_before, kept_after)


def show_seconds(nodes: Nodes) -> None:
    """Print how long the recoveries took, and the longest time between two steps."""
    for record in nodes.records("event", "recovered"):
        print({name: record[name] for name in ("ranks", "notice_s", "regroup_s", "restore_s", "redo_s", "why")})
    times = [record["time_s"] for record in nodes.records("train")]
    gaps = sorted((after - before for before, after in itertools.pairwise(times)), reverse=True)
    print("longest times between two steps:", [round(gap, 1) for gap in gaps[:4]])


def test_a_spare_node_takes_the_rank_of_a_node_that_lost_its_power_and_no_bit_changes(nodes: Nodes) -> None:
    process = nodes.launch(*SPARE_NODE)
    nodes.wait_for_step(10, process)
    nodes.wait_for_text("has joined the job")
    before = nodes.processes("node1")
    nodes.change("kill", "node2")
    nodes.wait_for_text("rank 1 on node2 continues on node3")
    nodes.wait_for_step(max(losses(nodes.run)) + 2, process)
    assert nodes.processes("node1").items() >= before.items(), "the survivors keep their processes"
    wanted = unbroken(nodes, ranks=2)
    assert nodes.end(process) == 0, nodes.log[-6000:]
    show_seconds(nodes)
    assert_written_by_one(nodes)
    assert losses(nodes.run) == wanted
    assert [record["ranks"] for record in nodes.records("event", "recovered")] == [[1]]


@pytest.mark.nightly
@pytest.mark.parametrize("direction", ["both", "to", "from"])
def test_the_old_side_of_a_cut_never_writes_and_ends_after_the_network_is_back(nodes: Nodes, direction: str) -> None:
    slow = ",".join(f"slow:0:{step}:vote" for step in range(11, 31))  # until the spare has imported everything
    process = nodes.launch(*SPARE_NODE, fault=slow)
    nodes.wait_for_step(10, process)
    nodes.wait_for_spare("node3")
    nodes.change("cut", "node2", direction)
    nodes.wait_for_text("rank 1 on node2 continues on node3")
    nodes.change("restore", "node2")
    wait_for(lambda: not nodes.processes("node2"), timeout_s=120)
    wanted = unbroken(nodes, ranks=2)
    assert nodes.end(process) == 0, nodes.log[-6000:]
    show_seconds(nodes)
    assert_written_by_one(nodes)
    assert losses(nodes.run) == wanted


@pytest.mark.nightly
def test_a_cut_that_is_shorter_than_the_limit_changes_nothing(nodes: Nodes) -> None:
    process = nodes.launch(*SPARE_NODE, "--recover.silent_s", "60")
    nodes.wait_for_step(10, process)
    nodes.change("cut", "node2")
    time.sleep(5.0)
    nodes.change("restore", "node2")
    wanted = unbroken(nodes, ranks=2)
    assert nodes.end(process) == 0, nodes.log[-6000:]
    show_seconds(nodes)
    assert nodes.records("event", "recovered") == []
    assert losses(nodes.run) == wanted


@pytest.mark.nightly
def test_rank_0_on_a_node_that_is_cut_off_is_replaced_and_never_writes_again(nodes: Nodes) -> None:
    """Rank 0 first moves to node 3, because its own node has no working spare. The coordinator stays on node 1."""
    fault = "kill:0:10,kill:0:0:spare@*"
    process = nodes.launch(*SPARE_NODE, *SHRINK, "--checkpoint.every_steps", "1", fault=fault)
    nodes.wait_for_text("rank 0 on node1 continues on node3")
    nodes.wait_for_step(15, process)
    nodes.change("cut", "node3", "from")
    nodes.wait_for_text("The job continues with 1 of 2 ranks")
    nodes.wait_for_step(max(losses(nodes.run)) + 3, process)
    nodes.change("restore", "node3")
    wait_for(lambda: not nodes.processes("node3"), timeout_s=120)
    assert nodes.end(process) == 0, nodes.log[-6000:]
    show_seconds(nodes)
    assert_written_by_one(nodes)
    assert_near(nodes, ranks=2)


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [SPARE_NODE, SHRINK])
def test_the_loss_of_one_agent_costs_its_node_and_not_the_job(settings: tuple[str, str], tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, slots=2)
    try:
        process = nodes.launch(*settings, "--train.num_lanes", "12")
        nodes.wait_for_step(10, process)
        if settings == SPARE_NODE:
            nodes.wait_for_spare("node3")
        nodes.kill_process("node2", "txl-agent-3")
        nodes.wait_for_text("the agents on node2 end")
        assert nodes.end(process) == 0, nodes.log[-6000:]
        show_seconds(nodes)
        assert_written_by_one(nodes)
        assert nodes.records("event", "stopped") == []
        assert {rank for record in nodes.records("event", "recovered") for rank in record["ranks"]} >= {2, 3}
    finally:
        nodes.down()


@pytest.mark.nightly
@pytest.mark.parametrize("program", ["txl", "deepspeed"])
def test_without_a_spare_node_the_job_continues_with_fewer_ranks(nodes: Nodes, program: str) -> None:
    every_step = ("--checkpoint.every_steps", "1", "--checkpoint.asynchronous", "False")
    process = nodes.launch(*SHRINK, *every_step, program=program)
    nodes.wait_for_step(10, process)
    nodes.change("kill", "node3")
    nodes.wait_for_text("The job continues with 2 of 3 ranks")
    nodes.wait_for_step(max(losses(nodes.run)) + 5, process)
    lost_at = nodes.records("event", "recovered")[0]["step"]
    assert nodes.end(process) == (0 if program == "txl" else SSH_FAILED), nodes.log[-6000:]
    show_seconds(nodes)
    assert_written_by_one(nodes)
    assert memory_goes_on(nodes, lost_at - 1)
    assert memory_goes_on(nodes, lost_at)  # one of the two steps is the first one with fewer ranks
    assert_near(nodes, ranks=3)


@pytest.mark.nightly
def test_a_lost_pair_of_neighbours_takes_the_job_to_the_checkpoint_in_the_same_process(nodes: Nodes) -> None:
    process = nodes.launch(*SHRINK)
    nodes.wait_for_step(13, process)
    nodes.change("kill", "node2")  # its copies are on node 3
    nodes.change("kill", "node3")
    before = nodes.processes("node1")
    nodes.wait_for_text("The run continues from a checkpoint")
    nodes.wait_for_step(max(losses(nodes.run)) + 2, process)
    assert set(nodes.processes("node1")) <= set(before)
    assert nodes.end(process) == 0, nodes.log[-6000:]
    show_seconds(nodes)
    steps = [record["step"] for record in nodes.records("train")]
    assert_written_by_one(nodes, steps_again=len(steps) - NUM_STEPS)
    assert 0 < len(steps) - NUM_STEPS < 20
    assert_near(nodes, ranks=3)


@pytest.mark.nightly
def test_under_torchrun_the_job_continues_on_the_node_that_is_left(nodes: Nodes) -> None:
    meeting = ("--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "node1", "--master_port", "29500")
    words = ("-m", "txl_dist", "train", "tiny.toml", "--run.dir", "run", *SHRINK)
    first, _ = (
        nodes.on(f"node{number + 1}", "torchrun", *meeting, "--node_rank", str(number), *words) for number in range(2)
    )
    nodes.wait_for_step(10, first)
    nodes.change("kill", "node2")
    nodes.wait_for_text("The job continues with 1 of 2 ranks")
    wait_for((nodes.run / "DONE").exists, timeout_s=400)
    show_seconds(nodes)
    assert_written_by_one(nodes)
    assert_near(nodes, ranks=2)
    assert nodes.end(first) == 0, "torchrun waits 300 s for the lost node"
