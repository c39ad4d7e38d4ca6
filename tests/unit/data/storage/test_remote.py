"""Access to URLs: what is refused, what is tried again, and that nothing waits without a limit."""

from __future__ import annotations

import random
import socket
import sys
import threading
from pathlib import Path

import fsspec
import psutil
import pytest
from fsspec.registry import _registry

from tests.helpers.http import serve
from tests.helpers.launch import wait_for
from tests.helpers.logs import recorded_log
from txl_dist.data.storage import fsspec_io as remote
from txl_dist.data.storage.bucket import Bucket
from txl_dist.data.storage.fsspec_io import check_protocol, filesystem_of, retrying, watched
from txl_dist.data.storage.remote import PipeOrigin, UrlOrigin
from txl_dist.errors import DataError, UnreachableError


class Flaky:
    """Fails with the given errors, one a call, then gives 7."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return 7


class HttpError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


@pytest.mark.parametrize(
    "url",
    [
        "file:///a",
        "http://a/b",
        "https://a/b",
        "s3://b/c",
        "gs://b",
        "gcs://b",
        "az://b",
        "abfs://b",
        "hf://d/e",
        "memory://a",
    ],
)
def test_the_usual_schemes_are_allowed(url: str) -> None:
    assert check_protocol(url) == url.partition(":")[0]


@pytest.mark.parametrize(
    ("url", "refused"),
    [
        ("pipe:cat {file}", "pipe"),
        ("pipe:cat a::b {file}", "pipe"),
        ("ssh://host/a", "ssh"),
        ("reference://a", "reference"),
        ("HTTP://a", "HTTP"),
        ("simplecache::https://a/b", "simplecache"),
        ("zip://x::https://a/b", "zip"),
        ("https://a::memory://b", "https"),
        ("https://a/b::c", "https"),
    ],
)
def test_schemes_that_may_run_programs_and_chains_are_refused_unless_named(url: str, refused: str) -> None:
    with pytest.raises(DataError, match=f"'{refused}'.*--allow-protocols, .* data.allow_protocols"):
        check_protocol(url)
    if refused != "https":
        assert check_protocol(url, allow=[refused]) == refused


def test_each_link_of_a_chain_must_be_allowed() -> None:
    with pytest.raises(DataError, match="'github'"):
        check_protocol("zip://x::github://a/b", allow=["zip"])


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)  # another test may have used s3fs
    with pytest.raises(DataError, match=r"s3://bucket/corpus needs .*pip install 'txl_dist\[s3\]'"):
        filesystem_of("s3://bucket/corpus")


def test_a_scheme_that_nobody_knows_is_an_error_even_where_allowed() -> None:
    with pytest.raises(DataError, match="cannot open nonsense://a"):
        filesystem_of("nonsense://a", allow=["nonsense"])


def test_what_fails_is_tried_again_and_each_wait_is_longer_and_logged() -> None:
    waits: list[float] = []
    action = Flaky(OSError("reset"), TimeoutError(), HttpError(503), HttpError(429))
    with recorded_log() as log:
        assert retrying(action, what="s3://b/c", retries=4, sleep=waits.append) == 7
    assert action.calls == 5
    assert len(waits) == 4
    for number, wait_s in enumerate(waits):
        assert 0.5 * 2**number <= wait_s <= 1.5 * 2**number
    assert log[0][1].startswith("s3://b/c: reset. Try 2 of 5 begins in ")
    assert len(log) == 4


def test_an_http_server_that_cannot_be_reached_is_not_called_an_absent_file() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/index.json"
    waits: list[float] = []
    with pytest.raises(UnreachableError, match=r"Connect.*try 3 of 3"):
        retrying(lambda: filesystem_of(url)[0].info(url), what=url, retries=2, sleep=waits.append)
    assert len(waits) == 2


def test_waiting_draws_nothing_from_the_global_generator() -> None:
    random.seed(3)
    state = random.getstate()
    retrying(Flaky(OSError("reset")), what="x", retries=1, sleep=lambda _: None)
    assert random.getstate() == state


def test_after_the_last_try_the_error_names_source_reason_and_tries() -> None:
    action = Flaky(*[OSError(f"reset {i}") for i in range(9)])
    with pytest.raises(DataError, match=r"cannot read s3://b/c: reset 3 \(try 4 of 4\)\. Check"):
        retrying(action, what="s3://b/c", retries=3, sleep=lambda _: None)
    assert action.calls == 4
    with pytest.raises(DataError, match=r"cannot read x: reset\. Check"):
        retrying(Flaky(OSError("reset")), what="x", retries=0, sleep=lambda _: None)


def test_no_message_shows_the_query_of_a_url_or_a_password() -> None:
    refused = 'Could not connect to the endpoint URL: "http://127.0.0.1:9/bucket?list-type=2&X-Amz-Signature=secret"'
    action = Flaky(ConnectionError(refused), ConnectionError(refused))
    with recorded_log() as log, pytest.raises(UnreachableError) as caught:
        retrying(action, what="https://me:secret@b/c?token=secret", retries=1, sleep=lambda _: None)
    reason = 'https://b/c: ConnectionError: Could not connect to the endpoint URL: "http://127.0.0.1:9/bucket"'
    assert log[0][1].startswith(f"{reason}. Try 2 of 2")
    assert str(caught.value).startswith(f"cannot read {reason} (try 2 of 2). Check")
    with pytest.raises(DataError, match=r"^zip://x.txt::https://b/c: the scheme 'zip'"):
        check_protocol("zip://x?txt::https://b/c?secret")
    assert UrlOrigin("https://me:secret@b/c?secret").name_of("x.tar") == "https://b/c/x.tar"
    assert Bucket("https://me:secret@b/c?secret").location == "https://b/c"
    assert PipeOrigin("pipe:curl https://b/{file}?secret").name_of("x.tar") == "pipe:curl https://b/x.tar"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:p@secret@b/c, https://b/c@1.", "https://b/c, https://b/c@1."),
        ("""'http://b/c?a="b"&sig=secret'. Check""", "'http://b/c'. Check"),
        ("""['HTTP://a','http://me:"secret@b/c'd?secret'] is""", """['HTTP://a','http://b/c'd'] is"""),
        ("http://a?secret,http://me:secret@b?secret: refused", "http://a: refused"),
        ("abfs://folder@account/c?d", "abfs://folder@account/c?d"),
    ],
)
def test_an_error_shows_scheme_host_and_path_of_each_url(text: str, shown: str) -> None:
    assert str(DataError(text)) == shown


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError("x"), PermissionError("x"), HttpError(403), HttpError(404), DataError("final")],
    ids=lambda e: f"{type(e).__name__}-{getattr(e, 'status', '')}",
)
def test_what_no_second_try_can_mend_is_final_at_once(error: Exception) -> None:
    action = Flaky(error)
    with pytest.raises(DataError):
        retrying(action, what="x", retries=5, sleep=lambda _: None)
    assert action.calls == 1


def test_an_action_that_stands_still_is_an_error_one_that_moves_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "TIMEOUT_S", 0.05)
    hang = threading.Event()
    with pytest.raises(TimeoutError, match=r"no data was received for 0\.05 s"):
        watched(hang.wait)
    hang.set()
    moves = iter(range(100))
    finish = threading.Event()

    def progress() -> int:
        move = next(moves)
        if move == 5:
            finish.set()
        return move

    assert watched(finish.wait, progress=progress) is True
    with pytest.raises(ZeroDivisionError):
        watched(lambda: 1 // 0)


def test_a_server_that_accepts_and_says_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "TIMEOUT_S", 0.2)
    (tmp_path / "a").write_bytes(b"0123456789")
    with serve(tmp_path) as server:
        origin = UrlOrigin(server.url)
        server.silent.add("a")
        with pytest.raises(TimeoutError):
            origin.read_range("a", 0, 2)
        server.silent.clear()
        server.stalled.add("a")
        with pytest.raises(TimeoutError):
            origin.download("a", tmp_path / "copy")


def test_the_watch_alone_ends_a_read_of_a_library_without_timeouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = threading.Event()
    monkeypatch.setattr(remote, "TIMEOUT_S", 0.05)
    file_system = fsspec.filesystem("memory")
    monkeypatch.setattr(type(file_system), "get_file", lambda *_, **__: hang.wait())
    with pytest.raises(TimeoutError):
        UrlOrigin("memory://watched").download("a", tmp_path / "a")
    hang.set()


def test_a_pipe_gives_what_the_command_writes_with_the_name_quoted(tmp_path: Path) -> None:
    (tmp_path / "a;b $(c)").write_bytes(b"content")
    origin = PipeOrigin(f"pipe:cat {tmp_path}/{{file}}")
    origin.download("a;b $(c)", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"content"
    assert origin.name_of("x.tar") == f"pipe:cat {tmp_path}/x.tar"


@pytest.mark.parametrize("status", [1, 23, 127, 141])
def test_any_exit_status_of_a_pipe_is_an_error(tmp_path: Path, status: int) -> None:
    origin = PipeOrigin(f"pipe:printf {{file}}; echo no such bucket >&2; exit {status}")
    with pytest.raises(OSError, match=f"exit status {status} and printed: no such bucket"):
        origin.download("a", tmp_path / "copy")


def test_a_pipe_whose_first_command_fails_is_an_error_although_the_last_one_succeeds(tmp_path: Path) -> None:
    origin = PipeOrigin(f"pipe:(cat {tmp_path}/{{file}}; exit 7) | cat")
    (tmp_path / "x.tar").write_bytes(b"whole")
    with pytest.raises(OSError, match="exit status 7"):
        origin.download("x.tar", tmp_path / "copy")


def test_a_pipe_that_stands_still_is_killed_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "TIMEOUT_S", 0.3)
    command = f"pipe:printf {{file}}; sleep 1000 & echo $! > {tmp_path}/pid; wait"
    with pytest.raises(TimeoutError):
        PipeOrigin(command).download("a", tmp_path / "copy")
    wait_for(lambda: not is_running(int((tmp_path / "pid").read_text())))


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_pipe_must_say_where_the_file_goes() -> None:
    with pytest.raises(DataError, match=r"\{file\}"):
        PipeOrigin("pipe:cat corpus.tar")
