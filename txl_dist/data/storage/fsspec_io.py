"""Files at URLs: which schemes may be used, and reads that are tried again, and never wait for ever.

    check_protocol     known schemes only; whatever may run a program has to be allowed by name
    filesystem_of      the fsspec file system of a URL, or which package to install
    retrying           tries again after growing, random waits; in the end an error that names the source
    watched            an error in place of a server that accepts and then says nothing

Whoever reads compares what came with its hash inside the action that is tried again, so that bytes changed on the
way are fetched again before they are called damaged. What it gives up: a thread that hangs in a library is left
behind, not ended; Python cannot end it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from txl_dist.console.logging import logger
from txl_dist.errors import DataError, TxlError, UnreachableError

Result = TypeVar("Result")

PROTOCOLS = ("file", "http", "https", "s3", "gs", "gcs", "az", "abfs", "hf", "memory")
TIMEOUT_S = 60.0
"""A read in which nothing moves for so long has failed."""
BACKOFF_S = 1.0
"""Mean wait before the second try; each further one is twice as long, up to a minute."""

_LONGEST_WAIT_S = 60.0
_SLOWEST_BYTES_PER_S = 100_000
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
    """Bytes came, and not those that the index describes; another try may bring the right ones."""


def check_protocol(url: str, *, allow: Sequence[str] = ()) -> str:
    """The scheme of a URL. Raises DataError unless it is a usual one or named in `allow`.

    So is every link of a chain (`zip://a::https://b`), whose outer links must be named even where they are usual.
    """
    links = [url] if url.startswith("pipe:") else url.split("::")
    protocols = [link.partition(":")[0] for link in links]
    for protocol, is_outer in zip(protocols, [True] * (len(links) - 1) + [False], strict=True):
        if protocol not in allow and (is_outer or protocol not in PROTOCOLS):
            raise DataError(
                f"{url}: the scheme {protocol!r} is not one of {', '.join(PROTOCOLS)}, and may run programs. "
                f"If you trust it, name it in --allow-protocols, or in a configuration in data.allow_protocols."
            )
    return protocols[0]


def filesystem_of(url: str, *, allow: Sequence[str] = ()) -> tuple[Any, str]:
    """(fsspec file system, path in it). Raises DataError if the scheme is not allowed or lacks its package."""
    protocol = check_protocol(url, allow=allow)
    try:
        from fsspec.core import url_to_fs

        file_system, path = url_to_fs(url, **_options(protocol))
    except ImportError as error:
        package = _PACKAGES.get(protocol, protocol)
        raise DataError(
            f"{url} needs a package that is missing ({error}). Install it with `pip install '{package}'`."
        ) from error
    except Exception as error:  # each file system looks for credentials in its own way and fails in its own way
        raise DataError(
            f"cannot open {url}: {_reason(error)}. Check the address, the network and the credentials."
        ) from error
    return file_system, path


def _options(protocol: str) -> dict[str, Any]:
    if protocol not in ("http", "https"):
        return {}
    from aiohttp import ClientTimeout

    # aiohttp's own limit is five minutes for a whole file, which would cut a large shard on a slow line.
    timeout = ClientTimeout(total=None, sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S)
    # Compressed on the way, ranges and sizes would be those of other bytes. trust_env: proxies, as curl does.
    return {
        "headers": {"Accept-Encoding": "identity"},
        "client_kwargs": {"timeout": timeout, "trust_env": True},
    }


def retrying(
    action: Callable[[], Result], *, what: str, retries: int, sleep: Callable[[float], None] = time.sleep
) -> Result:
    """The action's result, after up to `retries` failed tries. `what` is the source, for messages.

    Raises DataError if the file is absent, at once, or damaged each time; UnreachableError if it is forbidden, at once,
    or if it was the way to it that failed each time.
    """
    for attempt in range(1, retries + 2):
        try:
            return action()
        except TxlError:
            raise  # final by its nature, and says so itself
        except Exception as problem:  # noqa: BLE001  each library fails in its own way
            error = _real(problem)
            if attempt > retries or _is_final(error):
                is_damage = isinstance(error, FileNotFoundError | DamageError)
                raise (DataError if is_damage else UnreachableError)(
                    f"cannot read {what}: {_reason(error)} (try {attempt} of {retries + 1}). "
                    "Check the address, the network, the credentials and the file there."
                ) from error
            # Not from the global generator: reading data must not change what is drawn elsewhere.
            wait_s = min(BACKOFF_S * 2 ** (attempt - 1), _LONGEST_WAIT_S) * random.SystemRandom().uniform(0.5, 1.5)
            logger.warning("%s: %s; try %d of %d in %.1f s", what, _reason(error), attempt + 1, retries + 1, wait_s)
            sleep(wait_s)
    raise AssertionError("unreachable")


def _real(error: Exception) -> Exception:
    """What happened: fsspec calls every failure to look at an http file its absence."""
    cause = error.__cause__
    is_http = isinstance(cause, Exception) and type(cause).__module__.startswith("aiohttp")
    if isinstance(error, FileNotFoundError) and is_http and getattr(cause, "status", None) not in (404, 410):
        assert isinstance(cause, Exception)
        return cause
    return error


def _is_final(error: Exception) -> bool:
    status = getattr(error, "status", None)
    is_refusal = isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429)
    return is_refusal or isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | ImportError)


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    return str(error) if type(error) in (OSError, DamageError) else f"{type(error).__name__}: {error}".rstrip(": ")


def watched(action: Callable[[], Result], *, progress: Callable[[], int] = lambda: 0, num_bytes: int = 0) -> Result:
    """The action's result. Raises TimeoutError once `progress` has stood still for TIMEOUT_S.

    A read of `num_bytes` that shows no progress has longer. The action runs in a thread of its own, which is left to
    itself then: not every file system can be interrupted.
    """
    outcome: Future[Result] = Future()

    def work() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:  # noqa: BLE001  raised in the caller
            outcome.set_exception(error)

    timeout_s = TIMEOUT_S + num_bytes / _SLOWEST_BYTES_PER_S
    before = progress()
    threading.Thread(target=work, name="txl-read", daemon=True).start()
    while not wait([outcome], timeout=timeout_s).done:
        now = progress()
        if now == before:
            raise TimeoutError(f"nothing came for {timeout_s:g} s")
        before = now
    return outcome.result()
