"""Real ranks with launchers: torchrun on two nodes, slurm.sbatch with stand-ins for srun and scontrol, `txl launch`.

All tests but the first are nightly. tests/unit/test_launch_scripts.py tests slurm.sbatch at a warning, a save and an
end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.helpers.corpora import random_texts, tiny_corpus
from tests.helpers.forked import ENVIRONMENT
from tests.helpers.launch import wait_for
from tests.unit.test_launch_scripts import SCONTROL, SRUN, executable
from txl_dist.distributed.rendezvous import free_port

pytestmark = [pytest.mark.dist, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SETTINGS = """
[run]
dir = "run"
[data]
path = "corpus"
[model]
num_layers = 2
width = 32
num_heads = 2
head_width = 16
ff_width = 48
cutoffs = []
[train]
num_lanes = 4
segment_len = 16
memory_len = 16
microbatch_lanes = 2
max_steps = 300
[eval]
max_tokens = 512
[metrics]
log_every_steps = 1
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    tiny_corpus(tmp_path, texts=random_texts(count=300, longest=400))
    (tmp_path / "tiny.toml").write_text(SETTINGS, encoding="utf-8")
    return tmp_path


def last_step(job: Path) -> int:
    metrics = job / "run/metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return max((record["step"] for record in records if record["kind"] == "train"), default=0)


def test_two_nodes_under_torchrun_train_to_the_end(job: Path) -> None:
    meeting = [
        "--nnodes",
        "2",
        "--nproc_per_node",
        "1",
        "--master_addr",
        "127.0.0.1",
        "--master_port",
        str(free_port()),
    ]
    words = ["-m", "txl_dist", "train", "tiny.toml", "--train.max_steps", "20"]
    nodes = [
        subprocess.Popen(
            [str(BIN / "torchrun"), *meeting, "--node_rank", str(node), *words],
            cwd=job,
            env=os.environ | ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (0, 1)
    ]
    said = [node.communicate(timeout=180)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said[0][-3000:]
    assert (job / "run/DONE").read_text() == "20\n"


def slurm(job: Path, *settings: str, **variables: str) -> Callable[[], subprocess.Popen[str]]:
    """Return a function that starts slurm.sbatch on two pretended nodes."""
    (job / "launch").symlink_to(ROOT / "launch")
    (job / "bin").mkdir()
    executable(job / "bin/srun", SRUN)
    executable(job / "bin/scontrol", SCONTROL)
    given = {"SLURM_SUBMIT_DIR": str(job), "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "x", "SLOTS": "1"}
    environment = os.environ | ENVIRONMENT | given | variables
    environment["PATH"] = f"{job / 'bin'}:{ENVIRONMENT['PATH']}"

    def start() -> subprocess.Popen[str]:
        log = (job / "slurm.log").open("a", encoding="utf-8")
        command = ["bash", str(ROOT / "launch/slurm.sbatch"), "tiny.toml", *settings]
        return subprocess.Popen(command, cwd=job, env=environment, stdout=log, stderr=log, text=True)

    return start


@pytest.mark.nightly
def test_slurm_warns_queues_again_and_comes_to_the_end(job: Path) -> None:
    start = slurm(job)
    process = start()
    wait_for(lambda: last_step(job) >= 5, process=process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=90) == 75, (job / "slurm.log").read_text()[-3000:]
    assert (job / "scontrol.log").read_text() == "requeue 17\n"
    stopped_at = last_step(job)
    assert (job / f"run/checkpoints/step_{stopped_at:09d}").is_dir(), "no step is lost"
    assert stopped_at < 300

    process = start()
    assert process.wait(timeout=180) == 0, (job / "slurm.log").read_text()[-3000:]
    assert (job / "run/DONE").read_text() == "300\n"
    assert (job / "scontrol.log").read_text() == "requeue 17\n", "a run that is done is not queued again"


@pytest.mark.nightly
def test_a_job_of_slurm_survives_a_lost_node_and_is_not_queued_again(job: Path) -> None:
    """The nodes are pretended, so the end of node 1 closes its connections. tests/cluster cuts the network."""
    settings = ("--recover.spares", "1", "--recover.copies", "partner", "--recover.on_loss", "shrink")
    process = slurm(job, *settings, KILL_ON_BAD_EXIT="0")()
    wait_for(lambda: last_step(job) >= 5, process=process)
    (srun,) = [child for child in psutil.Process(process.pid).children() if "srun" in " ".join(child.cmdline())]
    (task,) = [child for child in srun.children() if child.environ()["SLURM_NODEID"] == "1"]
    for lost in (task, *task.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            lost.kill()
    assert process.wait(timeout=400) == 0, (job / "slurm.log").read_text()[-3000:]
    assert "The job continues with 1 of 2 ranks" in (job / "slurm.log").read_text()
    assert (job / "run/DONE").read_text() == "300\n"
    assert not (job / "scontrol.log").exists()


@pytest.mark.nightly
def test_txl_launch_names_the_agent_that_was_killed_and_the_same_command_continues(job: Path) -> None:
    """DeepSpeed's node launcher ends all processes when one of its child processes is killed."""
    steps = ("--train.max_steps", "100000", "--checkpoint.every_steps", "10")
    words = ["launch", "--num_accelerators", "2", "--spares", "1", "tiny.toml", "--recover.on_loss", "shrink", *steps]
    command = [sys.executable, "-m", "txl_dist", *words]
    environment = os.environ | ENVIRONMENT

    def start() -> subprocess.Popen[str]:
        log = (job / "launch.log").open("a", encoding="utf-8")
        return subprocess.Popen(command, cwd=job, env=environment, stdout=log, stderr=log, text=True)

    process = start()
    wait_for(lambda: last_step(job) >= 15, process=process)
    tree = psutil.Process(process.pid).children(recursive=True)
    agents = [child for child in tree if child.cmdline()[1:3] == ["-m", "txl_dist.distributed.recovery"]]
    (agent,) = [child for child in agents if child.environ()["RANK"] == "1"]
    agent.kill()
    assert process.wait(timeout=120) == 76, (job / "launch.log").read_text()[-3000:]
    last = (job / "launch.log").read_text().splitlines()[-1]
    assert last.startswith(
        "txl launch: the agent of a rank died of SIGKILL, so the launcher ended the job. Host memory"
    )
    assert last.endswith("The same command continues from the last checkpoint (exit code 76)")
    assert not [child for child in tree if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]

    stopped_at = max(int(path.name[-9:]) for path in (job / "run/checkpoints").glob("step_*"))
    assert stopped_at >= 10
    process = start()
    wait_for(lambda: f"step_{stopped_at:09d}" in (job / "launch.log").read_text().partition(last)[2], process=process)
    process.terminate()
    assert process.wait(timeout=120) == 75
