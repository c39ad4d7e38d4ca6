"""A mirror on a real S3 server: killed uploads, empty disks, other numbers of ranks, and refused starts."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos.lab import Lab
from tests.chaos.runs import Run
from tests.helpers import forked
from tests.helpers.job import Job
from tests.helpers.object_store import ObjectStore
from tests.helpers.ranks import run_ranks
from txl_dist.config.load import config_from_dict
from txl_dist.data.storage.bucket import Bucket
from txl_dist.data.storage.bucket_lock import BucketLock
from txl_dist.distributed.collectives import RankInfo
from txl_dist.distributed.processes import process_id
from txl_dist.distributed.recovery.seat import NODE
from txl_dist.distributed.rendezvous import free_port
from txl_dist.errors import ConfigError, UnreachableError
from txl_dist.train.checkpoint.mirror.mirror import Mirror, mirror_of, open_mirror
from txl_dist.train.checkpoint.mirror.ownership import claim_id, write_local_id

pytestmark = pytest.mark.dist

SHORT = ("--train.max_steps", "12", "--checkpoint.every_steps", "4", "--checkpoint.keep_last", "2")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("mirror"))


def losses_of(run: Run) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in run.records("train")}


def test_a_run_continues_on_an_empty_disk_from_the_mirror_alone(lab: Lab, store: ObjectStore) -> None:
    words = (*SHORT, "--checkpoint.mirror", f"{store.url}/run")
    killed, same, other = (lab.new_run(name) for name in ("killed", "same ranks", "one rank"))
    with lab.start(killed, *words, fault="kill:0:*:mirror-file#12") as job:  # 8 files each
        assert job.wait(limit_s=400)[0] == -9, job.text
        assert job.struck
    assert store.checkpoints("run") == [4]  # the cut upload is not a checkpoint
    cut = {name.split("/")[1] for name in store.names("run") if name.startswith("checkpoints/")}
    assert len(cut) == 2

    with lab.start(same, *words) as job:
        assert job.wait(limit_s=400) == [0, 0], job.text
    assert "step_000000004 was downloaded from" in job.text
    unbroken = lab.unbroken(*SHORT)
    expected = losses_of(unbroken)
    assert {step: losses_of(same)[step] for step in range(5, 13)} == {step: expected[step] for step in range(5, 13)}
    case = lab.case("mirror")
    lab.judge(case, same, unbroken, only_last=True)
    assert [problem for problem in case.problems if "config_sha256" not in problem] == []  # the setting of the mirror
    assert store.checkpoints("run")[-1] == 12
    assert len(store.checkpoints("run")) == 2
    assert {"RUN.json", "config.toml", "metrics.jsonl", "log.txt"} <= set(store.names("run"))
    assert "LOCK.json" not in store.names("run")

    with lab.start(other, *words, "--train.max_steps", "14", ranks=1) as job:
        assert job.wait(limit_s=400) == [0], job.text
    assert "resuming a checkpoint of 2 ranks on 1 rank" in job.text
    assert other.checkpoints == [12, 14]
    assert 4 in losses_of(other)  # the records came back too
    assert store.checkpoints("run") == [12, 14]
    assert '"event": "done"' in store.read("run/metrics.jsonl")

    foreign = ("--checkpoint.mirror", f"{store.url}/run")
    with lab.start(unbroken, *SHORT, "--train.max_steps", "16", *foreign, ranks=1) as job:
        assert job.wait(limit_s=400) == [2]
    assert "is the mirror of run" in job.text
    assert "Give another --checkpoint.mirror" in job.text
    assert unbroken.checkpoints[-1] == 12


def start_nodes(folder: Path, lab: Lab, *words: str) -> str:
    """Train on two pretended nodes, each with a run directory of its own. Return the output."""
    port = free_port()
    log = folder / "log.txt"
    processes = []
    for rank in range(2):
        node = folder / f"node{rank}"
        node.mkdir(parents=True, exist_ok=True)
        variables = forked.environment(**forked.place_on_node(rank, 2, port, num_nodes=2))
        command = ("train", str(lab.config), "--run.dir", "run", *words)
        processes.append(forked.start(forked.run_txl, *command, variables=variables, cwd=node, out=log))
    try:
        for process in processes:
            process.join(400)
            assert process.exitcode == 0, log.read_text(encoding="utf-8")[-4000:]
    finally:
        for process in processes:
            process.kill()
    return log.read_text(encoding="utf-8")


def weights_and_memories(run: Path) -> list[str]:
    newest = sorted((run / "checkpoints").glob("step_*"))[0]
    return sorted(path.relative_to(newest).as_posix() for path in newest.glob("[el]*/*"))


def test_nodes_without_a_shared_disk_continue_and_each_fetches_its_part_only(
    lab: Lab, store: ObjectStore, tmp_path: Path
) -> None:
    words = ("--checkpoint.every_steps", "4", "--checkpoint.mirror", f"{store.url}/nodes")
    start_nodes(tmp_path, lab, *words, "--train.max_steps", "4")
    assert store.checkpoints("nodes") == [4]
    own = ["engine/00001.safetensors", "lanes/00002-00003.safetensors"]
    assert weights_and_memories(tmp_path / "node1/run") == own
    shutil.rmtree(tmp_path / "node1")
    printed = start_nodes(tmp_path, lab, *words, "--train.max_steps", "12")
    assert weights_and_memories(tmp_path / "node1/run") == own
    assert weights_and_memories(tmp_path / "node0/run") != own
    assert "resume: from run/checkpoints/step_000000004" in printed
    records = map(json.loads, (tmp_path / "node0/run/metrics.jsonl").read_text(encoding="utf-8").splitlines())
    losses = {record["step"]: record["loss"] for record in records if record["kind"] == "train"}
    assert losses == losses_of(lab.unbroken(*SHORT))
    assert store.checkpoints("nodes")[-1] == 12


def open_with_a_foreign_folder(ranks: RankInfo, folder: Path) -> str:
    """Open the mirror of run a on two nodes, of which the second has the run directory of run b. Return the error."""
    os.environ[NODE] = f"node{ranks.rank}"
    run_dir = folder / f"node{ranks.rank}"
    run_dir.mkdir()
    if ranks.rank == 1:
        write_local_id(run_dir, "b", url="")
    config = config_from_dict(
        {"run": {"dir": str(run_dir)}, "checkpoint": {"mirror": f"file://{folder}/bucket"}}, source="test"
    )
    with pytest.raises(ConfigError) as caught:
        open_mirror(config, ranks, SimpleNamespace(lock=None, nonce="new"), resume="auto")  # type: ignore[arg-type]
    return str(caught.value)


def test_a_mirror_that_a_node_refuses_is_left_without_a_lock(tmp_path: Path) -> None:
    bucket = Bucket(f"file://{tmp_path}/bucket")
    claim_id(bucket, "a")
    errors = run_ranks(open_with_a_foreign_folder, tmp_path, world_size=2, folder=tmp_path / "ranks")
    assert all("is the mirror of run a, and" in error for error in errors)
    assert list(bucket.sizes()) == ["RUN.json"]


def begin_with_a_store_that_refuses(ranks: RankInfo, folder: Path) -> tuple[str, bool, Mirror | None]:
    """Open a mirror that then refuses everything: begin it in a new job and after a loss, and open it after a loss.

    Returns the error of the new job, whether the mirror is given up after the loss, and the second mirror.
    """
    config = config_from_dict(
        {"run": {"dir": str(folder / "run")}, "checkpoint": {"mirror": f"file://{folder}/bucket"}}, source="test"
    )
    watch: Any = SimpleNamespace(lock=None, nonce="new")
    mirror = open_mirror(config, ranks, watch, resume="auto")

    def refuse(*arguments: object) -> None:
        raise UnreachableError("the store refuses.")

    Bucket.upload = refuse  # type: ignore[method-assign]
    with pytest.raises(ConfigError) as caught:
        mirror.begin(None, losses={}, is_again=False)
    mirror.begin(None, losses={}, is_again=True)
    is_given_up = mirror.is_given_up
    mirror.close()
    Bucket.read = refuse  # type: ignore[method-assign]
    second = mirror_of(config, ranks, watch, resume="auto", is_again=True)
    return str(caught.value), is_given_up, second


def test_a_job_that_has_lost_a_rank_continues_without_a_mirror_that_refuses(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "run").mkdir()
    seen = run_ranks(begin_with_a_store_that_refuses, tmp_path, world_size=2, folder=tmp_path / "ranks")
    remedy = "the store refuses. To train without a mirror, remove checkpoint.mirror."
    assert seen == [(remedy, True, None)] * 2


def kill_after(job: Job, run: Run, *, delay_s: float, rank: int) -> bool:
    """Kill a rank some time after its first step. Return False if the job ended before."""
    job.wait_for(lambda: len(run.records("train")) > 0, limit_s=400)
    end_s = time.monotonic() + delay_s
    job.wait_for(lambda: time.monotonic() > end_s or len(job.exits) == 2, limit_s=400)
    job.signal(signal.SIGKILL, rank=rank)
    return len(job.exits) < 2


@pytest.mark.nightly
def test_twenty_random_kills_are_each_survived_on_an_empty_disk(lab: Lab, store: ObjectStore) -> None:
    num_kills = int(os.environ.get("TXL_MIRROR_KILLS", "20"))
    steps = ("--train.max_steps", "40", "--checkpoint.every_steps", "2")
    expected = losses_of(lab.unbroken(*steps))
    draw = random.Random(1)
    killed = series = 0
    is_done = True
    while killed < num_kills or not is_done:
        series += is_done
        run = lab.new_run("random kill")
        with lab.start(run, *steps, "--checkpoint.mirror", f"{store.url}/kills{series}") as job:
            if killed < num_kills:
                killed += kill_after(job, run, delay_s=draw.uniform(0, 6), rank=draw.randrange(2))
            job.wait(limit_s=400)
        is_done = run.is_done
        losses = losses_of(run)
        assert losses == {step: expected[step] for step in losses}
        print(f"kill {killed}: steps {min(losses)} to {max(losses)}, done: {is_done}", flush=True)


def test_a_mirror_in_use_or_out_of_reach_is_refused_before_any_work(lab: Lab, store: ObjectStore) -> None:
    run = lab.new_run("refused")
    lock = BucketLock.acquire(Bucket(f"{store.url}/used"), "run abc", nonce="held", remedy="")
    try:
        with lab.start(run, "--checkpoint.mirror", f"{store.url}/used", ranks=1) as job:
            assert job.wait(limit_s=400) == [2]
    finally:
        lock.release()
    assert f"in use by another job: run abc, pid {process_id().pid} on" in job.text
    with lab.start(run, "--checkpoint.mirror", "s3://nowhere/run", ranks=1) as job:
        assert job.wait(limit_s=400) == [2]
    assert "cannot write s3://nowhere/run/LOCK.json" in job.text
    assert "Check the address, the network, the credentials" in job.text
    assert not Path(run.dir).exists()
