"""The files of one corpus far away: at a URL that fsspec knows, or behind a shell command.

An origin tries once and raises whatever its library raises; `retries.retrying` goes around it. Each read is watched:
it ends in an error if nothing moves.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from typing_extensions import override

from txl_dist.data.format import ShardInfo
from txl_dist.data.storage.fsspec_io import DamageError, check_protocol, filesystem_of, retrying, watched
from txl_dist.data.storage.local import Storage, check_size
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

    @override
    def download(self, file: str, path: Path) -> None:
        watched(lambda: self._file_system.get_file(self._path_of(file), str(path)), progress=lambda: _size_of(path))

    def read_range(self, file: str, start: int, end: int) -> bytes:
        """Bytes start to end, fewer where the file ends before; more, if the server ignores ranges."""
        content: bytes = watched(
            lambda: self._file_system.cat_file(self._path_of(file), start=start, end=end), num_bytes=end - start
        )
        return content

    @override
    def sizes(self) -> dict[str, int] | None:
        """Web servers have no listing, and some stores let their files be read but not listed."""
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
    """`pipe:COMMAND with {file}`: what a shell command writes to its standard output, if it succeeds."""

    def __init__(self, location: str) -> None:
        """Raises DataError if the command does not say where the file's name goes."""
        self.location = location
        if "{file}" not in location:
            raise DataError(
                f"{location} does not say which file is wanted. Put {{file}} into the command, "
                "for instance `pipe:aws s3 cp s3://bucket/corpus/{file} -`."
            )

    @override
    def name_of(self, file: str) -> str:
        return self.location.replace("{file}", file)

    @override
    def download(self, file: str, path: Path) -> None:
        """Any exit status but 0 is an error, as `start_command` has it."""
        command = self.location.removeprefix("pipe:").replace("{file}", shlex.quote(file))
        with path.open("wb") as output, tempfile.TemporaryFile() as complaints:
            process = start_command(command, output=output, complaints=complaints)
            try:
                status = watched(process.wait, progress=lambda: _size_of(path))
            finally:
                end_command(process)
            complaints.seek(0)
            said = complaints.read()[-500:].decode(errors="replace").strip()
        if status != 0:
            raise OSError(f"the command ended with exit status {status}{f', saying: {said}' if said else ''}")


class RemoteStorage(Storage):
    """What all storages of a `Origin` share: small files, and sizes by one listing."""

    def __init__(self, origin: Origin, *, retries: int) -> None:
        self._origin = origin
        self._retries = retries
        self.location = origin.location

    @override
    def name_of(self, file: str) -> str:
        return self._origin.name_of(file)

    @override
    def read(self, file: str, *, sha256: str = "") -> bytes:
        """Read each time: these files are small, and fewer than the shards are opened."""
        with tempfile.TemporaryDirectory(prefix="txl-") as folder:
            path = Path(folder) / "file"

            def fetch() -> bytes:
                self._origin.download(file, path)
                content = path.read_bytes()
                if sha256 and hashlib.sha256(content).hexdigest() != sha256:
                    raise DamageError("damaged, its sha256 is not the one in the index")
                return content

            return retrying(fetch, what=self.name_of(file), retries=self._retries)

    @override
    def check_sizes(self, infos: Sequence[ShardInfo]) -> None:
        """Where there is no listing nothing is checked: the size is proven when a shard is opened."""
        sizes = retrying(self._origin.sizes, what=self.location, retries=self._retries)
        if sizes is None:
            return
        for info in infos:
            if info.name not in sizes:
                raise DataError(f"cannot read {self.name_of(info.name)}: it does not exist. Restore it from a copy.")
            check_size(self.name_of(info.name), sizes[info.name], info)


def start_command(
    command: str, *, output: int | IO[bytes], complaints: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """A shell command at work, with its standard output there. Any exit status but 0 means that the output may be cut,
    141 (a broken pipe) and 23 too; where bash is there, that of each command of a pipeline counts."""
    bash = shutil.which("bash")
    words = [bash, "-o", "pipefail", "-c", command] if bash else ["sh", "-c", command]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=complaints, start_new_session=True)


def end_command(process: subprocess.Popen[bytes]) -> None:
    """Kill a command that still runs, the shell and what it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
