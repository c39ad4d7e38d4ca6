"""The files of one corpus far away: at a URL that fsspec knows, or behind a shell command.

An origin tries once and raises whatever its library raises; `remote.retrying` goes around it. Each read is watched:
it ends in an error if nothing moves.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from txl_dist.data.storage.retries import check_protocol, filesystem_of, watched
from txl_dist.errors import DataError


class Origin(ABC):
    """The files of one corpus far away. Its methods raise what the library raises; `retrying` is around them."""

    location: str
    """URL, for messages."""

    def name_of(self, file: str) -> str:
        """Where a file lies, for messages."""
        return f"{self.location.rstrip('/')}/{file}"

    @abstractmethod
    def download(self, file: str, path: Path) -> None:
        """Write a whole file into the local file `path`, in place."""

    def sizes(self) -> dict[str, int] | None:
        """Bytes of each file by its name, or None where there is no listing."""
        return None


class UrlOrigin(Origin):
    """A folder of a file system of fsspec."""

    def __init__(self, url: str, *, allow: Sequence[str] = ()) -> None:
        """Raises DataError as `filesystem_of` does."""
        self.location = url
        self._protocol = check_protocol(url, allow=allow)
        self._file_system, self._folder = filesystem_of(url, allow=allow)

    def download(self, file: str, path: Path) -> None:
        """See `Origin`."""
        watched(lambda: self._file_system.get_file(self._path_of(file), str(path)), progress=lambda: _size_of(path))

    def read_range(self, file: str, start: int, end: int) -> bytes:
        """Bytes start to end, fewer where the file ends before; more, if the server ignores ranges."""
        content: bytes = watched(
            lambda: self._file_system.cat_file(self._path_of(file), start=start, end=end), num_bytes=end - start
        )
        return content

    def sizes(self) -> dict[str, int] | None:
        """See `Origin`. Web servers have no listing, and some stores let their files be read but not listed."""
        if self._protocol in ("http", "https"):
            return None
        try:
            entries = watched(lambda: self._file_system.ls(self._folder, detail=True))
        except PermissionError:
            return None
        return {entry["name"].rpartition("/")[2]: entry["size"] for entry in entries if entry["size"] is not None}

    def _path_of(self, file: str) -> str:
        return f"{self._folder.rstrip('/')}/{file}"


class PipeOrigin(Origin):
    """`pipe:COMMAND with {file}`: what a shell command writes to its standard output, if its exit status is 0."""

    def __init__(self, location: str) -> None:
        """Raises DataError if the command does not say where the file's name goes."""
        self.location = location
        if "{file}" not in location:
            raise DataError(
                f"{location} does not say which file is wanted. Put {{file}} into the command, "
                "for instance `pipe:aws s3 cp s3://bucket/corpus/{file} -`."
            )

    def name_of(self, file: str) -> str:
        """See `Origin`."""
        return self.location.replace("{file}", file)

    def download(self, file: str, path: Path) -> None:
        """See `Origin`. Any exit status but 0 is an error, 141 (a broken pipe) and 23 too."""
        command = self.location.removeprefix("pipe:").replace("{file}", shlex.quote(file))
        with path.open("wb") as output, tempfile.TemporaryFile() as complaints:
            process = subprocess.Popen(
                command, shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=complaints, start_new_session=True
            )
            try:
                status = watched(process.wait, progress=lambda: _size_of(path))
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # the shell and what it started
                    process.wait()
            complaints.seek(0)
            said = complaints.read()[-500:].decode(errors="replace").strip()
        if status != 0:
            raise OSError(f"the command ended with exit status {status}{f', saying: {said}' if said else ''}")


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
