"""The mirror: decisions about checkpoints in two places, and the thread that uploads."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from txl_dist.artifacts import CHECKPOINTS, SETTINGS
from txl_dist.config.load import config_from_dict, config_to_toml
from txl_dist.config.schema import CheckpointSection
from txl_dist.data.storage.bucket import Bucket, read_if_present
from txl_dist.errors import ConfigError, UnreachableError
from txl_dist.io.files import sha256_of_bytes
from txl_dist.io.manifest import MANIFEST, listed_files, write_manifest
from txl_dist.train.checkpoint.mirror import uploads
from txl_dist.train.checkpoint.mirror.choices import (
    MirroredCheckpoint,
    common_files,
    files_of_node,
    is_complete,
    list_mirrored,
    manifests_after,
    mirror_folder,
    needed_files,
    newest_first,
    objects_to_remove,
    why_foreign,
)
from txl_dist.train.checkpoint.mirror.downloads import _Fetch
from txl_dist.train.checkpoint.mirror.mirror import _check_settings, leaders_of, mirrored_precision
from txl_dist.train.checkpoint.mirror.ownership import claim_id, read_mirror_id
from txl_dist.train.checkpoint.mirror.uploads import Upload, Uploader


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(f"file://{tmp_path}/bucket/run")


def objects(step: int, *, manifest: bool = True, save: str = "0a") -> list[str]:
    folder = f"{CHECKPOINTS}/step_{step:09d}-{save * 4}"
    return [f"{folder}/state.json", f"{folder}/engine/00000.safetensors", *([f"{folder}/{MANIFEST}"] * manifest)]


def mirrored(*names: list[str]) -> list[MirroredCheckpoint]:
    return list_mirrored([name for group in names for name in group])


def test_a_checkpoint_of_the_mirror_is_whole_with_its_manifest_only() -> None:
    found = list_mirrored([*objects(10, manifest=False), *objects(2), "config.toml", "checkpoints/notes.txt"])
    assert [(checkpoint.step, checkpoint.is_whole) for checkpoint in found] == [(2, True), (10, False)]


def test_the_precision_of_a_run_is_that_of_its_settings_in_the_mirror(bucket: Bucket, tmp_path: Path) -> None:
    config = config_from_dict({"checkpoint": {"mirror": bucket.location}}, source="test")
    assert mirrored_precision(config) is None, "a new run"
    saved = config_from_dict({"engine": {"precision": "bf16"}}, source="test")
    (tmp_path / SETTINGS).write_text(config_to_toml(saved), encoding="utf-8")
    bucket.upload(tmp_path / SETTINGS, SETTINGS)
    assert mirrored_precision(config) == "bf16"


def test_a_mirror_with_other_frozen_settings_is_refused_with_a_remedy_that_helps(
    bucket: Bucket, tmp_path: Path
) -> None:
    saved = config_from_dict({"model": {"width": 16}}, source="test")
    (tmp_path / SETTINGS).write_text(config_to_toml(saved), encoding="utf-8")
    bucket.upload(tmp_path / SETTINGS, SETTINGS)
    with pytest.raises(ConfigError, match=r"model\.width: 16 -> 32(.|\n)*choose another --checkpoint\.mirror\."):
        _check_settings(bucket, config_from_dict({"model": {"width": 32}}, source="test"))


def test_two_saves_of_one_step_never_share_a_folder() -> None:
    assert mirror_folder(7, b"one") != mirror_folder(7, b"two")
    assert mirror_folder(7, b"one") == mirror_folder(7, b"one")
    assert list_mirrored([f"{mirror_folder(7, b'one')}/{MANIFEST}"])[0].is_whole


def test_the_newest_whole_checkpoint_of_both_places_comes_first_and_the_disk_wins_a_tie() -> None:
    there = mirrored(objects(4), objects(8), objects(12, manifest=False))
    assert newest_first([4, 6, 8], there) == [8, there[1], 6, 4, there[0]]
    assert newest_first([], there) == [there[1], there[0]]


def test_the_mirror_keeps_what_the_disk_keeps_and_removes_manifests_first() -> None:
    there = mirrored(objects(1), objects(2), objects(3), objects(4), objects(5))
    uploaded = there[-1].folder
    manifests, others = objects_to_remove(there, uploaded=uploaded, keep_last=2, keep_every=2, losses={1: 0.5, 3: 0.7})
    assert manifests == [there[2].manifest]
    assert sorted(others) == sorted(objects(3, manifest=False))


def test_parts_of_cut_uploads_and_other_saves_of_the_step_are_removed_but_no_later_part() -> None:
    there = mirrored(objects(3, manifest=False), objects(5), objects(5, save="ff"), objects(9, manifest=False))
    uploaded = there[1].folder
    manifests, others = objects_to_remove(there, uploaded=uploaded, keep_last=9, keep_every=0, losses={})
    assert {*manifests, *others} == {*objects(3, manifest=False), *objects(5, save="ff")}


def test_an_old_listing_that_lacks_the_uploaded_checkpoint_removes_nothing() -> None:
    for there in (mirrored(objects(3), objects(4)), mirrored(objects(3), objects(5, manifest=False))):
        uploaded = mirrored(objects(5))[0].folder
        assert objects_to_remove(there, uploaded=uploaded, keep_last=1, keep_every=0, losses={}) == ([], [])


def test_after_a_rewind_later_checkpoints_lose_their_manifests() -> None:
    there = mirrored(objects(3), objects(5), objects(7), objects(9, manifest=False))
    assert manifests_after(there, step=3) == [there[1].manifest, there[2].manifest]


def test_a_checkpoint_is_complete_when_every_file_has_its_size() -> None:
    files = {"a": {"bytes": 1}, "b/c": {"bytes": 2}}
    assert is_complete({"folder/a": 1, "folder/b/c": 2}, folder="folder", files=files)
    assert not is_complete({"folder/a": 1, "folder/b/c": 1}, folder="folder", files=files)
    assert not is_complete({"folder/a": 1, "other/b/c": 2}, folder="folder", files=files)


@pytest.mark.parametrize(
    ("own", "there", "facts", "is_refused"),
    [
        ("", "", (False, False, False), False),  # both new
        ("a", "", (True, False, False), False),  # a run that gets a mirror
        ("", "a", (False, False, False), False),  # an empty disk
        ("a", "a", (True, True, False), False),
        ("", "a", (True, True, False), False),  # the file with the id is lost
        ("", "a", (True, False, False), True),
        ("b", "a", (False, False, False), True),
        ("", "a", (False, False, True), True),  # a branch with the mirror of its parent
    ],
)
def test_a_run_uses_no_mirror_of_another_run(
    own: str, there: str, facts: tuple[bool, bool, bool], is_refused: bool
) -> None:
    has_checkpoints, shares, is_branch = facts
    reason = why_foreign(own, there, has_checkpoints=has_checkpoints, shares_a_checkpoint=shares, is_branch=is_branch)
    assert bool(reason) == is_refused


def test_each_node_uploads_what_its_ranks_have_written() -> None:
    files = [["engine/0", "state.json"], ["engine/1"], ["engine/2"]]
    nodes = ["a", "b", "a"]
    assert files_of_node(files, nodes, node="a") == ["engine/0", "state.json", "engine/2"]
    assert leaders_of(nodes) == [0, 1]


def test_a_node_needs_the_files_of_its_ranks_and_lanes_and_all_weights_when_they_were_divided_otherwise() -> None:
    files = [f"engine/{rank:05d}.safetensors" for rank in range(4)]
    files += [f"lanes/{lane:05d}-{lane + 1:05d}.safetensors" for lane in range(0, 8, 2)]
    files += ["state.json", "tokenizer.json"]
    assert common_files(files) == ["state.json", "tokenizer.json"]
    assert needed_files(files, ranks=(2, 3), lanes=[range(4, 6), range(6, 8)]) == [*files[2:4], *files[6:8]]
    assert needed_files(files, ranks=None, lanes=[range(1, 3)]) == files[:6]
    assert needed_files(files, ranks=(0,), lanes=[]) == files[:1]


def test_the_id_of_a_new_mirror_is_given_once(bucket: Bucket) -> None:
    assert read_mirror_id(bucket) == ""
    run_id = claim_id(bucket, "")
    assert read_mirror_id(bucket) == run_id
    with pytest.raises(ConfigError, match="another run began to use this mirror"):
        claim_id(bucket, "")


def checkpoint(run: Path, step: int, *, content: bytes = b"weights") -> Upload:
    folder = run / CHECKPOINTS / f"step_{step:09d}"
    (folder / "engine").mkdir(parents=True)
    files = {"engine/00000.safetensors": content + bytes([step]), "state.json": b"{}"}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    write_manifest(folder, {n: {"bytes": len(data), "sha256": sha256_of_bytes(data)} for n, data in files.items()})
    return Upload(folder, tuple(files))


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


class SlowBucket(Bucket):
    """Bucket that uploads only while its gate is open, and can fail."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.gate, self.began, self.failures = threading.Event(), threading.Event(), 0

    def upload(self, path: Path, name: str, *, parts_at_once: int = 2) -> None:
        self.began.set()
        assert self.gate.wait(60)
        if self.failures:
            self.failures -= 1
            raise UnreachableError(f"cannot write {name}: no space.")
        super().upload(path, name, parts_at_once=parts_at_once)


class LossyBucket(Bucket):
    """Bucket that loses the end of the first file, and in which only manifests can be removed."""

    num_uploads = 0

    def upload(self, path: Path, name: str, *, parts_at_once: int = 2) -> None:
        self.num_uploads += 1
        if self.num_uploads == 1:
            self.write(name, b"")
        else:
            super().upload(path, name, parts_at_once=parts_at_once)

    def remove(self, names: Iterable[str]) -> None:
        given = list(names)
        if any(not name.endswith(MANIFEST) for name in given):
            raise UnreachableError("cannot remove.")
        super().remove(given)


@pytest.fixture
def slow(tmp_path: Path) -> SlowBucket:
    return SlowBucket(f"file://{tmp_path}/bucket/run")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Uploader]]:
    """A function that starts an uploader, whose waits are short."""
    monkeypatch.setattr(uploads, "_FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(uploads, "_POLL_S", 0.02)
    started: list[Uploader] = []

    def make(bucket: Bucket, *, is_first: bool = True, num_nodes: int = 1, **values: Any) -> Uploader:
        settings = CheckpointSection(keep_last=2)
        run = tmp_path / "run"
        started.append(Uploader(bucket, settings, run_dir=run, is_first=is_first, num_nodes=num_nodes, **values))
        return started[-1]

    yield make
    for uploader in started:
        uploader.close()


def whole_steps(bucket: Bucket) -> list[int]:
    return [found.step for found in list_mirrored(bucket.sizes(CHECKPOINTS, nested=True)) if found.is_whole]


def test_checkpoints_are_uploaded_with_the_records_and_old_ones_removed(
    bucket: Bucket, tmp_path: Path, start: Callable[..., Uploader]
) -> None:
    uploader, run = start(bucket), tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("{}\n", encoding="utf-8")
    for step in (1, 2, 3):
        uploader.enqueue(checkpoint(run, step))
        wait_for(lambda: uploader.is_idle)
    assert whole_steps(bucket) == [2, 3]
    assert read_if_present(bucket, "metrics.jsonl") == b"{}\n"
    newest = list_mirrored(bucket.sizes(CHECKPOINTS, nested=True))[-1]
    assert set(listed_files(read_if_present(bucket, newest.manifest) or b"", where="there")) == {
        "engine/00000.safetensors",
        "state.json",
    }


def test_the_older_waiting_checkpoint_is_skipped_and_said_and_none_in_use_is_removed(
    slow: SlowBucket, tmp_path: Path, start: Callable[..., Uploader], caplog: pytest.LogCaptureFixture
) -> None:
    uploader = start(slow)
    uploader.enqueue(checkpoint(tmp_path / "run", 1))
    assert slow.began.wait(60)
    uploader.enqueue(checkpoint(tmp_path / "run", 2))
    uploader.enqueue(checkpoint(tmp_path / "run", 3))
    assert uploader.steps_in_use() == {1, 3}
    assert whole_steps(slow) == []  # a cut upload is not a checkpoint
    slow.gate.set()
    wait_for(lambda: uploader.is_idle)
    assert uploader.steps_in_use() == set()
    assert whole_steps(slow) == [1, 3]
    assert "step_000000002 is skipped" in caplog.text


def test_a_store_that_hangs_is_one_line_with_the_upload_in_progress_and_its_end_says_the_count(
    slow: SlowBucket, tmp_path: Path, start: Callable[..., Uploader], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    uploader = start(slow)
    uploader.enqueue(checkpoint(tmp_path / "run", 1))
    assert slow.began.wait(60)
    assert uploader.lacking() == "step_000000001"
    for step in (2, 3, 4, 5):
        uploader.enqueue(checkpoint(tmp_path / "run", step))
    (line,) = (record.message for record in caplog.records)
    assert line.startswith(f"mirror: step_000000001 has been in transfer to {slow.location} for 0 s")
    assert "so step_000000002 is skipped" in line
    assert uploader.lacking() == "5 checkpoints from step_000000001 to step_000000005"
    slow.gate.set()
    wait_for(lambda: uploader.is_idle)
    assert whole_steps(slow) == [1, 5]
    _, first, last = (record.message for record in caplog.records)
    assert first.endswith("Since the previous upload 3 other checkpoints could not be uploaded")
    assert "could not" not in last
    assert uploader.lacking() == "the last records of the run"


def test_an_error_is_one_line_and_the_upload_is_tried_again(
    slow: SlowBucket, tmp_path: Path, start: Callable[..., Uploader], caplog: pytest.LogCaptureFixture
) -> None:
    slow.failures = 2
    slow.gate.set()
    uploader = start(slow)
    uploader.enqueue(checkpoint(tmp_path / "run", 1))
    wait_for(lambda: uploader.is_idle)
    assert whole_steps(slow) == [1]
    lines = [record.message for record in caplog.records if "no space" in record.message]
    assert len(lines) == 1
    assert "Training continues" in lines[0]


def test_an_outage_is_one_line_for_all_files_and_checkpoints_and_its_end_says_how_many_were_skipped(
    slow: SlowBucket, tmp_path: Path, start: Callable[..., Uploader], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    slow.failures = 10**9
    slow.gate.set()
    uploader = start(slow)
    for step in (1, 2, 3):
        failures = slow.failures
        uploader.enqueue(checkpoint(tmp_path / "run", step))
        wait_for(lambda: uploader.steps_in_use() == {step})  # noqa: B023  called in this turn
        wait_for(lambda: slow.failures < failures - 4)  # noqa: B023
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    slow.failures = 0
    wait_for(lambda: uploader.is_idle)
    assert whole_steps(slow) == [3]
    (line,) = (record.message for record in caplog.records if "step_000000003 is in" in record.message)
    assert line.endswith("Since the previous upload 2 other checkpoints could not be uploaded")


def in_third_upload(slow: SlowBucket, tmp_path: Path, start: Callable[..., Uploader]) -> Uploader:
    """An uploader with two checkpoints in the mirror, and a third one in a transfer that waits for the gate."""
    slow.gate.set()
    uploader = start(slow)
    for step in (1, 2):
        uploader.enqueue(checkpoint(tmp_path / "run", step))
        wait_for(lambda: uploader.is_idle)
    slow.gate.clear()
    slow.began.clear()
    uploader.enqueue(checkpoint(tmp_path / "run", 3))
    assert slow.began.wait(60)
    return uploader


def test_a_rewind_makes_later_checkpoints_invalid_and_uploads_none_of_them(
    slow: SlowBucket, tmp_path: Path, start: Callable[..., Uploader]
) -> None:
    uploader = in_third_upload(slow, tmp_path, start)
    uploader.forget(1)
    slow.gate.set()
    wait_for(lambda: uploader.is_idle)
    assert whole_steps(slow) == [1]


def test_the_last_checkpoint_is_tried_again_although_records_are_due_or_a_rewind_ended_at_it(
    slow: SlowBucket, tmp_path: Path, start: Callable[..., Uploader]
) -> None:
    uploader = start(slow)
    slow.failures = 2
    uploader.enqueue(checkpoint(tmp_path / "run", 1))
    assert slow.began.wait(60)
    uploader.finish_records()
    uploader.forget(1)
    slow.gate.set()
    wait_for(lambda: uploader.is_idle)
    assert whole_steps(slow) == [1]


def test_of_two_rewinds_during_an_outage_the_earlier_step_counts(
    slow: SlowBucket, tmp_path: Path, start: Callable[..., Uploader]
) -> None:
    uploader = in_third_upload(slow, tmp_path, start)
    uploader.forget(1)
    uploader.forget(2)
    slow.gate.set()
    wait_for(lambda: uploader.is_idle)
    assert whole_steps(slow) == [1]


def test_a_file_that_arrived_cut_is_uploaded_again_before_the_manifest(
    tmp_path: Path, start: Callable[..., Uploader]
) -> None:
    bucket = LossyBucket(f"file://{tmp_path}/bucket/run")
    uploader = start(bucket)
    uploader.enqueue(checkpoint(tmp_path / "run", 1))
    wait_for(lambda: uploader.is_idle)
    assert whole_steps(bucket) == [1]
    stored = {name.rpartition("/")[2]: size for name, size in bucket.sizes(CHECKPOINTS, nested=True).items()}
    assert (stored["00000.safetensors"], stored["state.json"]) == (8, 2)


def test_a_removal_that_fails_leaves_no_checkpoint_without_files(
    tmp_path: Path, start: Callable[..., Uploader], caplog: pytest.LogCaptureFixture
) -> None:
    bucket = LossyBucket(f"file://{tmp_path}/bucket/run")
    bucket.num_uploads = 1
    uploader = start(bucket)
    for step in (1, 2, 3):
        uploader.enqueue(checkpoint(tmp_path / "run", step))
        wait_for(lambda: uploader.is_idle)
    assert whole_steps(bucket) == [2, 3]
    assert "cannot remove. Training continues" in caplog.text


@pytest.mark.parametrize("is_first", [True, False])
def test_a_checkpoint_that_has_left_the_disk_is_passed(
    bucket: Bucket, tmp_path: Path, start: Callable[..., Uploader], caplog: pytest.LogCaptureFixture, is_first: bool
) -> None:
    gone = checkpoint(tmp_path / "run", 1)
    shutil.rmtree(gone.folder)
    uploader = start(bucket, is_first=is_first, num_nodes=2 - is_first)
    uploader.enqueue(gone)
    wait_for(lambda: uploader.is_idle)
    assert whole_steps(bucket) == []
    assert "step_000000001 is no longer on the disk" in caplog.text


def test_the_first_node_waits_for_the_files_of_the_others(
    bucket: Bucket, tmp_path: Path, start: Callable[..., Uploader]
) -> None:
    whole = checkpoint(tmp_path / "run", 1)
    older = checkpoint(tmp_path / "run", 0)
    first, other = start(bucket, num_nodes=2), start(bucket, is_first=False, num_nodes=2)
    first.enqueue(whole._replace(names=whole.names[:1]))
    wait_for(lambda: uploads.ANNOUNCED in bucket.sizes())
    assert whole_steps(bucket) == []
    other.enqueue(older._replace(names=whole.names[1:]))
    other.enqueue(whole._replace(names=whole.names[1:]))
    wait_for(lambda: first.is_idle and other.is_idle)
    assert whole_steps(bucket) == [1]


def test_a_job_that_lost_the_lock_uploads_no_manifest(
    bucket: Bucket, tmp_path: Path, start: Callable[..., Uploader], caplog: pytest.LogCaptureFixture
) -> None:
    uploader = start(bucket, confirm=lambda: False)
    uploader.enqueue(checkpoint(tmp_path / "run", 1))
    wait_for(lambda: uploader.is_idle)
    assert whole_steps(bucket) == []
    assert "another job has taken over" in caplog.text


@pytest.mark.parametrize("damage", ["nothing", "bit", "cut"])
def test_a_download_is_compared_with_its_hash(bucket: Bucket, tmp_path: Path, damage: str) -> None:
    content = b"x" * 1000
    stored = {"nothing": content, "bit": b"y" + content[1:], "cut": content[:-1]}[damage]
    bucket.write("step/engine/0", stored)
    files = {"engine/0": {"bytes": len(content), "sha256": sha256_of_bytes(content)}}
    fetch = _Fetch(["engine/0"], "step", files, tmp_path / "new", bucket)
    wait_for(lambda: fetch.is_done)
    fetch.check()
    assert bool(fetch.problems) == (damage != "nothing")
    assert all("engine/0" in problem for problem in fetch.problems)


def test_a_file_that_the_mirror_lacks_is_a_problem_of_its_checkpoint_only(bucket: Bucket, tmp_path: Path) -> None:
    fetch = _Fetch(["x"], "step", {"x": {"bytes": 1, "sha256": ""}}, tmp_path / "new", bucket)
    wait_for(lambda: fetch.is_done)
    fetch.check()
    assert fetch.problems == ["x is missing"]


def test_no_name_in_a_manifest_leads_out_of_the_folder(bucket: Bucket, tmp_path: Path) -> None:
    bucket.write("step/x", b"x")
    fetch = _Fetch(["../x"], "step", {"../x": {"bytes": 1, "sha256": ""}}, tmp_path / "new", bucket)
    wait_for(lambda: fetch.is_done)
    fetch.check()
    assert "is not the name of a file" in fetch.problems[0]
