"""Objects of a bucket: listed, read by range, created by one process only, and failures as one line."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest

from txl_dist.data.storage.bucket import Bucket, read_if_present
from txl_dist.data.storage.fsspec_io import retrying
from txl_dist.errors import DataError, UnreachableError


@pytest.fixture(params=["file", "memory"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bucket]:
    yield Bucket(f"file://{tmp_path}/bucket/run" if request.param == "file" else "memory://bucket/run")
    fsspec.filesystem("memory").store.clear()


def test_objects_are_written_read_created_once_and_removed(bucket: Bucket, tmp_path: Path) -> None:
    assert bucket.sizes() == {}
    assert read_if_present(bucket, "a/b") is None
    bucket.write("a/b", b"one")
    bucket.write("a/b", b"two!")
    assert bucket.read("a/b") == b"two!"
    assert bucket.read("a/b", 1, 3) == b"wo"
    assert bucket.read("a/b", 3, 3) == b""
    assert not bucket.create("a/b", b"three")
    assert bucket.create("c", b"three")
    assert bucket.create("c", b"three")  # a try whose answer was lost
    assert bucket.sizes() == {"c": 5}
    assert bucket.sizes(nested=True) == {"a/b": 4, "c": 5}
    assert bucket.sizes("a") == {"a/b": 4}
    bucket.download("a/b", tmp_path / "copy")
    bucket.upload(tmp_path / "copy", "d")
    bucket.remove(["a/b", "none"])
    assert bucket.sizes(nested=True) == {"c": 5, "d": 4}
    with pytest.raises(DataError, match=r"cannot read .*/a/b from .*: it does not exist"):
        bucket.read("a/b")


@pytest.mark.parametrize("code", ["QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "507"])
def test_a_full_store_gets_a_remedy_of_its_own(code: str) -> None:
    answer: Any = Exception()
    answer.response = {"Error": {"Code": code}}  # as botocore's errors have it

    def write() -> None:
        raise OSError(5, f"{code} when calling the PutObject operation") from answer

    with pytest.raises(UnreachableError, match=rf"cannot write s3://b/a: .*{code}.*\. Free space in the bucket"):
        retrying(write, what="s3://b/a", retries=0, verb="write")


def test_a_refusal_gets_the_remedy_for_credentials() -> None:
    with pytest.raises(UnreachableError, match=r"Check that you may write there: the credentials can be .* expired"):
        retrying(failing(PermissionError("Access Denied")), what="s3://b/a", retries=3, verb="write")


def test_of_many_creations_at_one_moment_one_succeeds(tmp_path: Path) -> None:
    bucket = Bucket(f"file://{tmp_path}/bucket")
    ready = threading.Barrier(8)

    def create(number: int) -> bool:
        ready.wait()
        return bucket.create("lock", b"%d" % number)

    with ThreadPoolExecutor(8) as threads:
        created = list(threads.map(create, range(8)))
    assert created.count(True) == 1
    assert bucket.read("lock") == b"%d" % created.index(True)


def test_a_missing_package_or_an_unknown_scheme_is_said_with_its_remedy() -> None:
    with pytest.raises(DataError, match="can run programs"):
        Bucket("zip://a::file://b")
    with pytest.raises(DataError, match="pip install 'adlfs'"):
        Bucket("az://container/run")


def test_replaced_credentials_are_read_after_a_refusal(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.write("x", b"content")
    with monkeypatch.context() as patched:
        patched.setattr(bucket._file_system, "cat_file", failing(PermissionError("the token has expired")))
        before = bucket._file_system
        with pytest.raises(UnreachableError, match="the token has expired"):
            bucket.read("x")
        assert bucket.read("x") == b"content"
    assert bucket._file_system is not before


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("method", "verb", "act"),
    [
        ("find", "list", lambda bucket: bucket.sizes()),
        ("cat_file", "read", lambda bucket: read_if_present(bucket, "x")),
        ("pipe_file", "write", lambda bucket: bucket.write("x", b"")),
        ("rm_file", "remove", lambda bucket: bucket.remove(["x"])),
        ("put_file", "write", lambda bucket: bucket.upload(Path(__file__), "x")),
        ("get_file", "read", lambda bucket: bucket.download("x", Path("x"))),
    ],
)
def test_each_failure_names_host_action_and_object(
    monkeypatch: pytest.MonkeyPatch, method: str, verb: str, act: Callable[[Bucket], object]
) -> None:
    bucket = Bucket("memory://bucket/run")
    monkeypatch.setattr(bucket._file_system, method, failing(PermissionError("the token has expired")))
    with pytest.raises(UnreachableError) as caught:
        act(bucket)
    where = "memory://bucket/run" if method == "find" else "memory://bucket/run/x"
    expected = f"cannot {verb} {where} from {socket.gethostname()}: PermissionError: the token has expired. Check"
    assert str(caught.value).startswith(expected)
