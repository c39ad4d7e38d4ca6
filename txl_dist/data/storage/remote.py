"""Remote files of one corpus: at a URL that fsspec knows, or from a shell command.

An origin tries once and raises whatever its library raises; its callers use `fsspec_io.retrying`. Each read is watched:
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
from txl_dist.data.storage.base import Storage, check_size
from txl_dist.data.storage.fsspec_io import DamageError, check_protocol, filesystem_of, retrying, watched
from txl_dist.errors import DataError


class Origin(ABC):
    """Remote files of one corpus. Its methods raise what their library raises; callers use `retrying`."""

    location: str
    """URL or command of the files, for messages."""

    def name_of(self, file: str) -> str:
        """Return the URL of a file, for messages."""
        return f"{self.location.rstrip('/')}/{file}"

    @abstractmethod
    def download(self, file: str, path: Path) -> None:
        """Write a whole file into the local file `path`, in place."""

    def sizes(self) -> dict[str, int] | None:
        """Return the size of each file by its name, or None where there is no listing."""
        return None


class UrlOrigin(Origin):
    """Folder of an fsspec file system."""

    def __init__(self, url: str, *, allow: Sequence[str] = ()) -> None:
        """Open the URL. Raises DataError as `filesystem_of` does."""
        self.location = url
        self._protocol = check_protocol(url, allow=allow)
        self._file_system, self._folder = filesystem_of(url, allow=allow)

    @override
    def download(self, file: str, path: Path) -> None:
        def get() -> None:
            self._file_system.get_file(self._path_of(file), str(path))

        watched(get, progress=lambda: _size_of(path))

    def read_range(self, file: str, start: int, end: int) -> bytes:
        """Return bytes start to end: fewer if the file ends before, more if the server ignores ranges."""

        def cat() -> bytes:
            content: bytes = self._file_system.cat_file(self._path_of(file), start=start, end=end)
            return content

        return watched(cat, num_bytes=end - start)

    @override
    def sizes(self) -> dict[str, int] | None:
        """Return the sizes, or None: web servers have no listing, and some stores do not permit it."""
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
    """Standard output of a shell command, `pipe:COMMAND with {file}`, if it succeeds."""

    def __init__(self, location: str) -> None:
        """Set the command. Raises DataError if it does not say where the file's name goes."""
        self.location = location
        if "{file}" not in location:
            raise DataError(
                f"{location} does not say which file to read. Put {{file}} into the command, "
                "for instance `pipe:aws s3 cp s3://bucket/corpus/{file} -`."
            )

    @override
    def name_of(self, file: str) -> str:
        return self.location.replace("{file}", file)

    @override
    def download(self, file: str, path: Path) -> None:
        """Run the command. Raises OSError for any exit status but 0 (see `start_command`)."""
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
                suffix = f", saying: {last_output}"
            else:
                suffix = ""
            raise OSError(f"the command ended with exit status {status}{suffix}")


class RemoteStorage(Storage):
    """Base of the storages of an `Origin`: it reads small files, and checks sizes by one listing."""

    def __init__(self, origin: Origin, *, retries: int) -> None:
        self._origin = origin
        self._retries = retries
        self.location = origin.location

    @override
    def name_of(self, file: str) -> str:
        return self._origin.name_of(file)

    @override
    def read(self, file: str, *, sha256: str = "") -> bytes:
        """Download the file each time: these files are small, and read less often than shards."""
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
        """Check the sizes in the listing. Without one nothing is checked until a shard is opened."""
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
    """Start a shell command with its standard output in `output`.

    Any exit status but 0 means that the output may be cut, 141 (a broken pipe) and 23 included. With bash the status of
    each command of a pipeline counts.
    """
    bash = shutil.which("bash")
    if bash:
        words = [bash, "-o", "pipefail", "-c", command]
    else:
        words = ["sh", "-c", command]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=complaints, start_new_session=True)


def end_command(process: subprocess.Popen[bytes]) -> None:
    """Kill a command that still runs: the shell and the processes that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _size_of(path: Path) -> int:
    if path.exists():
        return path.stat().st_size
    return 0
