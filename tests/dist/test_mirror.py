"""A mirror on a real S3 server: killed uploads, empty disks, other numbers of ranks, and refused starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.lab import Lab
from tests.chaos.runs import Run
from tests.helpers.object_store import ObjectStore, serve_objects
from txl_dist.distributed.processes import process_id
from txl_dist.train.checkpoint.mirror.bucket import Bucket
from txl_dist.train.checkpoint.mirror.ownership import MirrorLock

pytestmark = pytest.mark.dist

SHORT = ("--train.max_steps", "12", "--checkpoint.every_steps", "4", "--checkpoint.keep_last", "2")


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with serve_objects() as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.variables.items():
            patch.setenv(name, value)
        yield store


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
    assert case.problems == []
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


def test_a_mirror_in_use_or_out_of_reach_is_refused_before_any_work(lab: Lab, store: ObjectStore) -> None:
    run = lab.new_run("refused")
    lock = MirrorLock.acquire(Bucket(f"{store.url}/used"), "abc", nonce="held")
    try:
        with lab.start(run, "--checkpoint.mirror", f"{store.url}/used", ranks=1) as job:
            assert job.wait(limit_s=400) == [2]
    finally:
        lock.release()
    assert f"in use by another job: run abc, pid {process_id().pid} on" in job.text
    with lab.start(run, "--checkpoint.mirror", "s3://nowhere/run", ranks=1) as job:
        assert job.wait(limit_s=400) == [2]
    assert "cannot write s3://nowhere/run/LOCK.json" in job.text
    assert "Check the address, the network and the credentials" in job.text
    assert not Path(run.dir).exists()
