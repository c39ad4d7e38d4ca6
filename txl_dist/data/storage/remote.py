"""Remote files of one corpus: at a URL that fsspec can open, or from a shell command.

An `Origin` tries each read once and raises the exception of its library. Callers try again with `fsspec_io.retrying`. A
read without progress ends in a TimeoutError.
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
from txl_dist.data.storage.base import Storage, check_size
from txl_dist.data.storage.fsspec_io import DamageError, check_protocol, filesystem_of, retrying, watched
from txl_dist.errors import DataError, without_secrets


class Origin(ABC):
    """Interface to the remote files of one corpus.

    Each method tries once and raises the exception of its library. Callers try again with `retrying`.
    """

    location: str
    """URL of the files, or the shell command that reads them."""

    def name_of(self, file: str) -> str:
        """Return the URL of a file, for messages."""
        return f"{without_secrets(self.location).rstrip('/')}/{file}"

    @abstractmethod
    def download(self, file: str, path: Path) -> None:
        """Write the content of a remote file into the local file `path`. An existing file is overwritten in place, not
        replaced."""

    def sizes(self) -> dict[str, int] | None:
        """Return the size of each file in bytes by the file's name, or None if the source has no listing of files."""
        return None


class UrlOrigin(Origin):
    """Remote files at a URL, which fsspec reads."""

    def __init__(self, url: str, *, allow: Sequence[str] = ()) -> None:
        """Open the file system of the URL. Raises DataError if the URL is not allowed or cannot be opened."""
        self.location = url
        self._protocol = check_protocol(url, allow=allow)
        self._file_system, self._folder = filesystem_of(url, allow=allow)

    @override
    def download(self, file: str, path: Path) -> None:
        def get() -> None:
            self._file_system.get_file(self._path_of(file), str(path))

        watched(get, progress=lambda: _size_of(path))

    def read_range(self, file: str, start: int, end: int) -> bytes:
        """Return the bytes `start` to `end` - 1 of a file.

        The result is shorter if the file ends before `end`, and longer if the server ignores ranges.
        """

        def cat() -> bytes:
            content: bytes = self._file_system.cat_file(self._path_of(file), start=start, end=end)
            return content

        return watched(cat, num_bytes=end - start)

    @override
    def sizes(self) -> dict[str, int] | None:
        """Return the size of each file in bytes, or None if the server has no listing or does not permit it."""
        if self._protocol in ("http", "https"):
            return None
        try:
            entries = watched(lambda: self._file_system.ls(self._folder, detail=True))
        except PermissionError:
            return None
        sizes: dict[str, int] = {}
        for entry in entries:
            _, _, name = entry["name"].rpartition("/")
            if entry["size"] is not None:
                sizes[name] = entry["size"]
        return sizes

    def _path_of(self, file: str) -> str:
        return f"{self._folder.rstrip('/')}/{file}"


class PipeOrigin(Origin):
    """Remote files that a shell command writes to its standard output.

    The location is `pipe:COMMAND`, where COMMAND contains `{file}` in place of a file's name.
    """

    def __init__(self, location: str) -> None:
        """Take the command from the location. Raises DataError if the command does not contain `{file}`."""
        self.location = location
        if "{file}" not in location:
            raise DataError(
                f"{location} does not say which file to read. Put {{file}} into the command, "
                "for instance `pipe:aws s3 cp s3://bucket/corpus/{file} -`."
            )

    @override
    def name_of(self, file: str) -> str:
        return without_secrets(self.location.replace("{file}", file))

    @override
    def download(self, file: str, path: Path) -> None:
        """Run the command for one file, and write its output to `path`. Raises OSError if its exit status is not 0."""
        command = self.location.removeprefix("pipe:").replace("{file}", shlex.quote(file))
        with path.open("wb") as output, tempfile.TemporaryFile() as complaints:
            process = start_command(command, output=output, complaints=complaints)
            try:
                status = watched(process.wait, progress=lambda: _size_of(path))
            finally:
                end_command(process)
            complaints.seek(0)
            last_output = complaints.read()[-500:].decode(errors="replace").strip()
        if status != 0:
            if last_output:
                suffix = f" and printed: {last_output}"
            else:
                suffix = ""
            raise OSError(f"the command ended with exit status {status}{suffix}")


class RemoteStorage(Storage):
    """Base class of the storages at a URL: reads small files, and checks the sizes of shards by a listing."""

    def __init__(self, origin: Origin, *, retries: int) -> None:
        self._origin = origin
        self._retries = retries
        self.location = origin.location

    @override
    def name_of(self, file: str) -> str:
        return self._origin.name_of(file)

    @override
    def read(self, file: str, *, sha256: str = "") -> bytes:
        """Download a small file and return its content.

        The file is not kept, because small files are read less often than shards.
        """
        with tempfile.TemporaryDirectory(prefix="txl-") as folder:
            path = Path(folder) / "file"

            def fetch() -> bytes:
                self._origin.download(file, path)
                content = path.read_bytes()
                if sha256 and hashlib.sha256(content).hexdigest() != sha256:
                    raise DamageError("the file is damaged: its sha256 differs from the sha256 in the index")
                return content

            return retrying(fetch, what=self.name_of(file), retries=self._retries)

    @override
    def check_sizes(self, infos: Sequence[ShardInfo]) -> None:
        """Compare the sizes in the remote listing with the index.

        If there is no listing, the size of a shard is checked when the shard is opened.
        """
        sizes = retrying(self._origin.sizes, what=self.location, retries=self._retries)
        if sizes is None:
            return
        for info in infos:
            if info.name not in sizes:
                raise DataError(
                    f"cannot read {self.name_of(info.name)}: the file does not exist. Restore the file from a copy."
                )
            check_size(self.name_of(info.name), sizes[info.name], info)


def start_command(
    command: str, *, output: int | IO[bytes], complaints: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start a shell command that writes its standard output to `output`.

    If the exit status is not 0, the output can be truncated. This is true for the statuses 141 (a broken pipe) and 23
    too, which webdataset ignores. With bash, a pipeline fails if any of its commands fails.
    """
    bash = shutil.which("bash")
    if bash:
        words = [bash, "-o", "pipefail", "-c", command]
    else:
        words = ["sh", "-c", command]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=complaints, start_new_session=True)


def end_command(process: subprocess.Popen[bytes]) -> None:
    """Kill a command that is still running, with all processes that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _size_of(path: Path) -> int:
    if path.exists():
        return path.stat().st_size
    return 0
