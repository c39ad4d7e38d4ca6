"""Folder of an object store through fsspec: list, read, write, create, remove, upload and download its objects.

An object appears at once when it is complete, except that `write` and `upload` to a `file://` folder show it earlier.
Listings are never cached. A failure of a library or a network becomes an UnreachableError, which says which host could
not do what to which object, after the given number of retries. The methods can be called from several threads.

Limitations: exclusive creation is exact on S3, Google Cloud Storage, Azure and local disks. Other file systems check
first and then write.
"""

from __future__ import annotations

import inspect
import math
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from txl_dist.data.storage.fsspec_io import filesystem_of, retrying, s3_code
from txl_dist.errors import DataError, UnreachableError, without_secrets
from txl_dist.io.files import create_file

Item = TypeVar("Item")
Result = TypeVar("Result")

PART_BYTES = 6 * 2**20
"""Bytes of a large file that one request sends or fetches. This bounds the memory of a transfer."""
PARTS_AT_ONCE = 2
"""Number of parts of one file that are in transfer at the same time."""
_MAX_STREAM_BYTES = 2**30
"""Bytes up to which a file is sent to S3 in one request, without a copy in memory."""
_MAX_PARTS = 9000
"""Maximum number of parts of one file. S3 allows 10,000."""
_REMOVALS_AT_ONCE = 16
_NOT_CREATED = ("PreconditionFailed", "ConditionalRequestConflict")
"""Codes of S3 for an object that exists already, or that another process creates at the same moment."""


class Readable(Protocol):
    """Place with files that are read by name, such as a `Bucket`."""

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises DataError if it is missing, and UnreachableError."""


class Bucket:
    """Folder of an object store. Names of objects are relative to this folder."""

    def __init__(self, url: str, *, allow: Sequence[str] = (), retries: int = 0) -> None:
        """Open the file system of a URL. Raises DataError if its package is missing or its scheme is not allowed.

        `allow` contains schemes that are allowed in addition (`data.allow_protocols`). A request that fails is tried
        again up to `retries` times.
        """
        self.location = without_secrets(url).rstrip("/")
        """URL of the folder, for messages."""
        self._url = url.rstrip("/")
        self._allow = tuple(allow)
        self._retries = retries
        self._is_refused = False
        self._open()

    def sizes(self, folder: str = "", *, nested: bool = False) -> dict[str, int]:
        """Return the size in bytes of every object in a folder, by name. A missing folder has no objects.

        With `nested` the objects of folders below are included. Raises UnreachableError.
        """

        def find() -> dict[str, Any]:
            self._file_system.invalidate_cache()
            found: dict[str, Any] = self._file_system.find(self._path(folder), detail=True)
            return found

        sizes = {}
        num_skipped = len(self._path(folder)) + 1
        for path, facts in self._try("list", folder, find).items():
            is_folder = not path[num_skipped:] or path.endswith("/")
            if not is_folder and (nested or "/" not in path[num_skipped:]):
                sizes[path[len(self._root) + 1 :]] = int(facts["size"])
        return sizes

    def read(self, name: str, first: int = 0, end: int | None = None) -> bytes:
        """Return the bytes of an object from `first` up to `end`, or to its end.

        Raises DataError if there is no such object, and UnreachableError.
        """
        if end == first:  # some stores return the whole object for an empty range
            return b""
        if end is None and not first:
            limits = self._known("cat_file", max_concurrency=1)  # else s3fs asks for the size before it reads
        else:
            limits = {"start": first, "end": end}
        content: bytes = self._try("read", name, lambda: self._file_system.cat_file(self._path(name), **limits))
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a small object, or replace it. Raises UnreachableError."""
        self._try("write", name, lambda: self._file_system.pipe_file(self._path(name), content))

    def create(self, name: str, content: bytes) -> bool:
        """Write a small object that must not exist yet, with content that no other process writes.

        Returns False if another process has created it. Raises UnreachableError.
        """

        def create() -> bool:
            path = self._path(name)
            try:
                if self._url.startswith("file://"):  # where fsspec checks first and then writes
                    Path(path).parent.mkdir(parents=True, exist_ok=True)
                    create_file(Path(path), content)
                else:
                    self._file_system.pipe_file(path, content, mode="create")
            except OSError as error:
                if not isinstance(error, FileExistsError) and s3_code(error) not in _NOT_CREATED:
                    raise
                return read_if_present(self, name) == content  # the answer to an earlier try can have been lost
            return True

        return self._try("write", name, create)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, in any order. Missing objects are ignored. Raises UnreachableError."""

        def remove(name: str) -> None:
            with suppress(FileNotFoundError):
                self._file_system.rm_file(self._path(name))

        # One request per object: s3fs does not report what a request for many objects could not remove.
        in_threads(lambda name: self._try("remove", name, lambda: remove(name)), names, at_once=_REMOVALS_AT_ONCE)

    def upload(self, path: Path, name: str, *, parts_at_once: int = PARTS_AT_ONCE) -> None:
        """Copy a file into the bucket. Raises UnreachableError, or OSError if the file cannot be read."""
        num_bytes = path.stat().st_size
        part_bytes = max(PART_BYTES, math.ceil(num_bytes / _MAX_PARTS))
        limits = self._known("put_file", chunksize=part_bytes, max_concurrency=parts_at_once)

        def put() -> None:
            if hasattr(self._file_system, "get_s3") and num_bytes <= _MAX_STREAM_BYTES:
                _stream_to_s3(self._file_system, path, self._path(name))
            else:
                self._file_system.put_file(str(path), self._path(name), **limits)

        self._try("write", name, put)

    def download(self, name: str, path: Path) -> None:
        """Copy an object into a file. Raises DataError if there is no such object, and UnreachableError."""
        limits = self._known("get_file", chunksize=PART_BYTES, max_concurrency=PARTS_AT_ONCE)
        self._try("read", name, lambda: self._file_system.get_file(self._path(name), str(path), **limits))

    def _open(self) -> None:
        """Open the file system, with the credentials of now."""
        self._file_system, root = filesystem_of(self._url, allow=self._allow, is_new=self._is_refused)
        self._root = root.rstrip("/")
        self._is_refused = False

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _known(self, method: str, **arguments: int) -> dict[str, Any]:
        """Return those arguments that a method of the file system knows."""
        function = getattr(self._file_system, f"_{method}", None) or getattr(self._file_system, method)
        known = inspect.signature(function).parameters
        return {name: value for name, value in arguments.items() if name in known}

    def _try(self, verb: str, name: str, action: Callable[[], Result]) -> Result:
        what = f"{self.location}/{name}".rstrip("/")
        if self._is_refused:
            self._open()
        try:
            return retrying(action, what=f"{what} from {socket.gethostname()}", retries=self._retries, verb=verb)
        except UnreachableError as error:
            # Credentials in a file can be replaced while the run lives, but a file system reads them only once.
            self._is_refused = isinstance(error.__cause__, PermissionError)
            raise


def _stream_to_s3(file_system: Any, path: Path, target: str) -> None:
    """Send a file to S3 in one request that reads it piece by piece.

    s3fs itself reads a file or its parts into memory, and its own retries would not begin at the start of a stream.
    """
    from botocore.exceptions import ClientError
    from fsspec.asyn import sync
    from s3fs.errors import translate_boto_error

    bucket, key, _ = file_system.split_path(target)
    options = {**file_system.s3_additional_kwargs, **file_system.req_kw}

    async def put() -> None:
        await file_system.set_session()
        client = await file_system.get_s3(bucket)
        with path.open("rb") as stream:
            await client.put_object(Bucket=bucket, Key=key, Body=stream, **options)

    try:
        sync(file_system.loop, put)
    except ClientError as error:
        raise translate_boto_error(error) from error
    finally:
        file_system.invalidate_cache()


def read_if_present(files: Readable, name: str) -> bytes | None:
    """Return the content of a file, or None if there is no such file. Raises UnreachableError."""
    try:
        return files.read(name)
    except UnreachableError:
        raise
    except DataError:
        return None


def in_threads(action: Callable[[Item], object], items: Iterable[Item], *, at_once: int) -> None:
    """Call `action` for each item, some at the same time. Raises the first error, after which no further item begins.

    The threads do not delay the end of the process.
    """
    waiting = deque(items)
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                item = waiting.popleft()
            except IndexError:
                return
            try:
                action(item)
            except BaseException as error:  # noqa: BLE001  raised in the caller
                errors.append(error)

    threads = [threading.Thread(target=work, name="transfer", daemon=True) for _ in range(min(at_once, len(waiting)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
