"""A run on two nodes, started with pdsh over ssh: it stops on request, ends when a link is cut, and resumes exactly.

The nodes are those of tools/checks/local_cluster.sh, with their own network, host name, process numbers and sshd.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.cluster import CLUSTER, ROOT, losses, processes, why_not
from tests.helpers.corpora import random_texts, tiny_corpus
from tests.helpers.forked import ENVIRONMENT
from tests.helpers.launch import wait_for

SETTINGS = """
[data]
path = "corpus"
[model]
num_layers = 2
width = 32
num_heads = 2
head_width = 16
ff_width = 48
cutoffs = []
dropout = 0.1
[optim]
lr = 3e-3
[train]
num_lanes = 8
segment_len = 16
memory_len = 16
microbatch_lanes = 2
max_steps = 240
[engine]
timeout_s = 6
start_timeout_s = 120
[checkpoint]
every_steps = 25
[eval]
max_tokens = 1024
[metrics]
log_every_steps = 1
"""


pytestmark = [
    pytest.mark.cluster,
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "cluster"
    subprocess.run([CLUSTER, "up", "2", str(folder)], check=True, timeout=60)
    yield folder
    subprocess.run([CLUSTER, "down", str(folder)], check=True, timeout=60)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    tiny_corpus(folder, texts=random_texts(count=300, longest=400))
    (folder / "tiny.toml").write_text(SETTINGS, encoding="utf-8")
    return folder


def start(cluster: Path, job: Path, *flags: str) -> subprocess.Popen[str]:
    """The one command, on node 1."""
    words = ["bash", str(ROOT / "launch/multinode.sh"), str(cluster / "hostfile"), "tiny.toml", *flags]
    environment = os.environ | ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "eth0"}
    log = (job / "launch.log").open("w", encoding="utf-8")
    return subprocess.Popen(
        [CLUSTER, "exec", str(cluster), "node1", *words], cwd=job, env=environment, stdout=log, stderr=log, text=True
    )


def start_on_one_node(job: Path, *flags: str) -> subprocess.Popen[bytes]:
    words = ["txl", "launch", "--num_accelerators", "4", "tiny.toml", *flags]
    return subprocess.Popen(words, cwd=job, env=os.environ | ENVIRONMENT, stdout=subprocess.DEVNULL)


def assert_empty(cluster: Path) -> None:
    """No rank, launcher or helper is left on any node, or is only just leaving."""
    wait_for(lambda: not processes(cluster, "node1") and not processes(cluster, "node2"), timeout_s=30)


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    wait_for(lambda: (run / "metrics.jsonl").exists() and max(losses(run), default=0) >= step, process=process)


def test_a_run_on_two_nodes_survives_a_stop_and_a_cut_link_and_ends_like_one_on_one_node(
    cluster: Path, job: Path
) -> None:
    run, log = job / "run", job / "launch.log"
    words = ["--run.dir", "run"]

    process = start(cluster, job, *words)
    wait_for_step(run, 20, process)
    for node in ("node1", "node2"):
        ranks = [words for words in processes(cluster, node).values() if "--local_rank=1" in words]
        assert len(ranks) == 1, node
    (launcher,) = [
        pid for pid, words in processes(cluster, "node1").items() if words[1:2] and words[1].endswith("/txl")
    ]
    os.kill(launcher, signal.SIGTERM)
    assert process.wait(timeout=90) == 75, log.read_text()[-3000:]
    assert_empty(cluster)
    stopped_at = max(losses(run))
    assert not (run / "STOP").exists()
    assert (run / f"checkpoints/step_{stopped_at:09d}").is_dir(), "no step is lost"

    process = start(cluster, job, *words)
    wait_for_step(run, stopped_at + 30, process)
    subprocess.run([CLUSTER, "cut", str(cluster), "node2"], check=True)
    cut_s = time.monotonic()
    whole = start_on_one_node(job, "--run.dir", "whole")  # meanwhile: two cores are few
    assert process.wait(timeout=120) == 76, log.read_text()[-3000:]
    print(f"the job ended {time.monotonic() - cut_s:.1f} s after the cut")
    assert "rank 2 on node2" in log.read_text(), "whom it waited for"
    assert_empty(cluster)
    assert max(losses(run)) < 240

    process = start(cluster, job, *words)
    assert process.wait(timeout=90) == 2, "one node is still cut off"
    assert "node2: " in log.read_text()

    subprocess.run([CLUSTER, "restore", str(cluster), "node2"], check=True)
    process = start(cluster, job, *words)
    assert process.wait(timeout=180) == 0, log.read_text()[-3000:]
    assert (run / "DONE").read_text() == "240\n"
    assert_empty(cluster)

    assert whole.wait(timeout=180) == 0
    here, there = losses(run), losses(job / "whole")
    assert here.keys() == there.keys() == set(range(1, 241))
    assert max(abs(here[step] - there[step]) for step in here) <= 1e-6


def test_a_cluster_for_one_command_leaves_nothing_behind(tmp_path: Path) -> None:
    def links() -> list[str]:
        shown = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True)
        return [line.split()[0] for line in shown.stdout.splitlines()]

    before = links()
    script = 'hostname; cat "$HOSTFILE"; ssh node2 hostname; ip -br link show eth0 | cut -d@ -f1; exit 7'
    environment = os.environ | {"TMPDIR": str(tmp_path), "SLOTS": "3"}
    done = subprocess.run(
        [CLUSTER, "2", "sh", "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines() == ["node1", "node1 slots=3", "node2 slots=3", "node2", "eth0"]
    assert links() == before
    assert list(tmp_path.iterdir()) == []


ODD_WORDS = [
    "two  blanks",
    'it\'s "quoted"',
    "$HOME `id` $(id)",
    "back\\slash\\n",
    "%h %n 100%",
    "a\nb",
    "\u00e9 \u5b57",
    "*;&|<>~#!",
]


def test_words_arrive_on_every_node_as_they_were_typed(cluster: Path, job: Path) -> None:
    """A run's own record of its settings is made by rank 0 of what all ranks read."""
    prompt = " and ".join(ODD_WORDS)
    words = ["--hostfile", str(cluster / "hostfile"), "--num_gpus", "1", "--no_ssh_check", "--master_addr", "node1"]
    settings = ["--run.dir", "run", "--train.max_steps", "1", f"--metrics.sample_prompt={prompt}"]
    done = subprocess.run(
        [CLUSTER, "exec", str(cluster), "node1", "txl", "launch", *words, "tiny.toml", *settings],
        cwd=job,
        env=os.environ | ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "eth0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    recorded = tomllib.loads((job / "run/config.toml").read_text(encoding="utf-8"))
    assert recorded["metrics"]["sample_prompt"] == prompt
    assert "2 ranks" in done.stderr
