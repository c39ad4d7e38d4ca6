"""Files at URLs: the schemes that may be used, and reads with retries and timeouts.

    check_protocol     refuses unknown schemes, which may run a program, unless a setting allows them by name
    filesystem_of      returns the fsspec file system of a URL, or raises an error with the package to install
    retrying           tries again after growing random waits, and finally raises an error that names the source
    watched            raises an error if a server accepts a connection and then sends nothing

Readers compare the bytes with their hash inside the action that is tried again. So bytes that the network has changed
are fetched again before they are reported as damaged. Limitations: Python cannot end a thread that hangs in a library.
Such a thread remains until the process ends.
"""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from txl_dist.console.logging import logger
from txl_dist.errors import DataError, TxlError, UnreachableError, without_secrets

Result = TypeVar("Result")

PROTOCOLS = ("file", "http", "https", "s3", "gs", "gcs", "az", "abfs", "hf", "memory")
TIMEOUT_S = 60.0
"""Seconds without progress after which a read fails."""
BACKOFF_S = 1.0
"""Mean seconds before the second try. Each further wait is twice as long as the wait before it, up to a minute."""

_MAX_WAIT_S = 60.0
_MIN_BYTES_PER_S = 100_000
_WORDS_OF_A_FULL_STORE = ("Quota", "StorageFull", "InsufficientStorage", "507")
"""Parts of the codes by which stores that speak S3 say that they are full. The protocol has no code for it."""
_PACKAGES = {
    "http": "txl_dist[http]",
    "https": "txl_dist[http]",
    "s3": "txl_dist[s3]",
    "gs": "txl_dist[gs]",
    "gcs": "txl_dist[gs]",
    "az": "adlfs",
    "abfs": "adlfs",
    "hf": "huggingface_hub",
}


class DamageError(OSError):
    """Error for received bytes whose hash differs from the index. `retrying` fetches such bytes again."""


def check_protocol(url: str, *, allow: Sequence[str] = ()) -> str:
    """Return the scheme of a URL. Raises DataError unless the scheme is in PROTOCOLS or in `allow`.

    In a chain of URLs (`zip://a::https://b`) every scheme is checked, and all schemes before the last must be in
    `allow`.
    """
    if url.startswith("pipe:"):
        links = [url]
    else:
        links = url.split("::")
    protocols = [link.partition(":")[0] for link in links]
    for number, protocol in enumerate(protocols):
        is_outer = number < len(protocols) - 1
        if protocol not in allow and (is_outer or protocol not in PROTOCOLS):
            raise DataError(
                f"{url}: the scheme {protocol!r} can run programs. These schemes are always allowed: "
                f"{', '.join(PROTOCOLS)}. If you trust this scheme, add the scheme to --allow-protocols, or to "
                "data.allow_protocols in a configuration."
            )
    return protocols[0]


def filesystem_of(url: str, *, allow: Sequence[str] = (), is_new: bool = False) -> tuple[Any, str]:
    """Return (fsspec file system of a URL, path in this file system). With `is_new` it reads its credentials again.

    Raises DataError if the scheme is not allowed, if its package is not installed, or if the file system cannot be
    opened.
    """
    protocol = check_protocol(url, allow=allow)
    try:
        from fsspec.core import url_to_fs

        file_system, path = url_to_fs(url, skip_instance_cache=is_new, **_options(protocol))
    except ImportError as error:
        package = _PACKAGES.get(protocol, protocol)
        raise DataError(
            f"{url} needs a package that is missing ({error}). Install the package with `pip install '{package}'`."
        ) from error
    except Exception as error:  # each file system looks for credentials in its own way and fails in its own way
        raise DataError(
            f"cannot open {url}: {_reason(error)}. Check the address, the network and the credentials."
        ) from error
    return file_system, path


def _options(protocol: str) -> dict[str, Any]:
    """Return the arguments with which fsspec opens the file system of a scheme."""
    if protocol == "file":
        return {"auto_mkdir": True}  # as on an object store, where folders need not be made
    if protocol not in ("http", "https"):
        return {}
    from aiohttp import ClientTimeout

    # aiohttp's own limit is five minutes for a whole file, which would cut a large shard on a slow line.
    timeout = ClientTimeout(total=None, sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S)
    # With compression, ranges and sizes would be those of the compressed bytes. trust_env: use proxies, as curl does.
    return {
        "headers": {"Accept-Encoding": "identity"},
        "client_kwargs": {"timeout": timeout, "trust_env": True},
    }


def retrying(
    action: Callable[[], Result],
    *,
    what: str,
    retries: int,
    verb: str = "read",
    sleep: Callable[[float], None] = time.sleep,
) -> Result:
    """Call `action` until it succeeds, at most `retries` + 1 times, and return its result.

    `what` names the source and `verb` the action in messages. Raises DataError at once if a file to read is missing,
    and after the last try if the bytes were damaged. Raises UnreachableError at once if access is forbidden, and after
    the last try if the connection failed.
    """
    for attempt in range(1, retries + 2):
        try:
            return action()
        except TxlError:
            raise  # another try would not help, and its message is complete
        except Exception as problem:  # noqa: BLE001  each library fails in its own way
            error = _real(problem)
            if attempt > retries or _is_final(error):
                is_missing = isinstance(error, FileNotFoundError) and verb == "read"
                error_type = DataError if is_missing or isinstance(error, DamageError) else UnreachableError
                tries = f" (try {attempt} of {retries + 1})" if retries else ""
                raise error_type(f"cannot {verb} {what}: {_reason(error)}{tries}. {_remedy(error, verb)}") from error
            # Not from the global generator: reading data must not change what is drawn elsewhere.
            mean_wait_s = min(BACKOFF_S * 2 ** (attempt - 1), _MAX_WAIT_S)
            wait_s = mean_wait_s * random.SystemRandom().uniform(0.5, 1.5)
            description = without_secrets(f"{what}: {_reason(error)}")
            logger.warning("%s. Try %d of %d begins in %.1f s", description, attempt + 1, retries + 1, wait_s)
            sleep(wait_s)
    raise AssertionError("unreachable")


def _real(error: Exception) -> Exception:
    """Return the error that made a request fail.

    fsspec raises FileNotFoundError for every failed HTTP request. Unless the file is absent, the cause of that
    exception is returned.
    """
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or not isinstance(cause, Exception):
        return error
    is_http = type(cause).__module__.startswith("aiohttp")
    is_absent = getattr(cause, "status", None) in (404, 410)
    if is_http and not is_absent:
        return cause
    return error


def _is_final(error: Exception) -> bool:
    """Return whether another try would fail in the same way, for instance because access is forbidden."""
    status = getattr(error, "status", None)
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | ImportError):
        return True
    is_refusal = isinstance(status, int) and 400 <= status < 500
    return is_refusal and status not in (408, 425, 429)


def _reason(error: Exception) -> str:
    """Return the text of an error, as a part of a message."""
    if isinstance(error, FileNotFoundError):
        return "the bucket does not exist" if s3_code(error) == "NoSuchBucket" else "it does not exist"
    if type(error) in (OSError, DamageError):
        return str(error)
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _remedy(error: Exception, verb: str) -> str:
    """Return what the user can do about an error, as a sentence."""
    code = s3_code(error)
    is_full_disk = verb == "write" and getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    if is_full_disk or any(word in code for word in _WORDS_OF_A_FULL_STORE):
        return "Free space in the bucket, or raise its quota."
    if isinstance(error, PermissionError) or getattr(error, "status", None) in (401, 403):
        return f"Check that you may {verb} there: the credentials can be wrong, expired or without this right."
    return "Check the address, the network, the credentials and the file at this address."


def s3_code(error: BaseException) -> str:
    """Return S3's code for an error that s3fs has raised, or an empty text."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def watched(action: Callable[[], Result], *, progress: Callable[[], int] = lambda: 0, num_bytes: int = 0) -> Result:
    """Run `action` in a new thread and return its result. Raises TimeoutError if `progress` does not change for
    TIMEOUT_S.

    A read of `num_bytes` bytes that reports no progress gets one more second per 100,000 bytes. After a timeout the
    thread continues, because not every file system can be interrupted.
    """
    outcome: Future[Result] = Future()

    def work() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:  # noqa: BLE001  raised in the caller
            outcome.set_exception(error)

    timeout_s = TIMEOUT_S + num_bytes / _MIN_BYTES_PER_S
    before = progress()
    threading.Thread(target=work, name="txl-read", daemon=True).start()
    while not wait([outcome], timeout=timeout_s).done:
        now = progress()
        if now == before:
            raise TimeoutError(f"no data was received for {timeout_s:g} s")
        before = now
    return outcome.result()
