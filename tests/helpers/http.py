"""A web server for tests that serves a folder and can fail in the ways in which servers fail."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


class FileServer:
    """Serves a folder. Its attributes can be changed at any time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self.requests: Counter[str] = Counter()
        """Number of GETs of each file."""
        self.has_ranges = True
        """Whether ranges are served. Otherwise the whole file is sent with status 200 for any range."""
        self.failures: Counter[str] = Counter()
        """Number of next GETs of a file that are answered with status 500."""
        self.damaged: Counter[str] = Counter()
        """Number of next GETs of a file in which the middle byte is changed."""
        self.cut: Counter[str] = Counter()
        """Number of next GETs of a file in which only half is sent, with the length of the half."""
        self.torn: Counter[str] = Counter()
        """Number of next GETs of a file in which the connection is closed after half of the announced length."""
        self.stalled: set[str] = set()
        """Files of which half is sent at once, and the rest after `end` is set."""
        self.silent: set[str] = set()
        """Files whose GETs are accepted but never answered."""
        self.status: dict[str, int] = {}
        """Status code with which a file is refused."""
        self.end = threading.Event()


@contextmanager
def serve(folder: Path) -> Iterator[FileServer]:
    """Yield a server on a free port. Requests to it do not use a proxy of this machine."""
    files = FileServer(folder)

    class Handler(_Handler):
        server_files = files

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    files.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("no_proxy", "127.0.0.1")
        try:
            yield files
        finally:
            files.end.set()
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server_files: FileServer

    def do_GET(self) -> None:
        files, name = self.server_files, self.path.lstrip("/")
        files.requests[name] += 1
        path = files.folder / name
        if name in files.silent:
            files.end.wait()
            return
        if files.failures[name] > 0:
            files.failures[name] -= 1
            self.send_error(500)
            return
        if name in files.status or not path.is_file():
            self.send_error(files.status.get(name, 404))
            return
        content = path.read_bytes()
        if files.damaged[name] > 0:
            files.damaged[name] -= 1
            middle = len(content) // 2
            content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        self._send(self._range_of(content), name)

    def do_HEAD(self) -> None:
        self.send_error(405)

    def log_message(self, *_: object) -> None:
        pass

    def _range_of(self, content: bytes) -> bytes | None:
        """Return the bytes to send, or None if the range begins after the end of the file."""
        wanted = self.headers.get("Range")
        if wanted is None or not self.server_files.has_ranges:
            self.send_response(200)
            return content
        start, end = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
        if start >= len(content):
            self.send_error(416)
            return None
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{min(end, len(content) - 1)}/{len(content)}")
        return content[start : end + 1]

    def _send(self, content: bytes | None, name: str) -> None:
        if content is None:
            return
        files = self.server_files
        half = content[: len(content) // 2]
        if files.cut[name] > 0:
            files.cut[name] -= 1
            content = half
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if name in files.stalled:
            self.wfile.write(half)
            self.wfile.flush()
            files.end.wait()
            self.wfile.write(content[len(half) :])
            return
        is_torn = files.torn[name] > 0
        files.torn[name] -= is_torn
        self.wfile.write(half if is_torn else content)
