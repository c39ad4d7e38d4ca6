"""Chooses the storage of a corpus by the location of the corpus.

    folder                 shards are mapped into memory and not copied: local.py
    URL, cache_dir set     a whole shard is downloaded once per node, checked by size and sha256, then mapped: cache.py
    URL, no cache_dir      each document is read by a range request: ranges.py
    pipe:COMMAND {file}    like a URL with cache_dir, but a shell command reads the files: remote.py

All storages implement the interface `Storage`. A pipe is refused unless data.allow_protocols names it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from txl_dist.data.storage.base import Storage
from txl_dist.data.storage.cache import CachedStorage
from txl_dist.data.storage.fsspec_io import check_protocol
from txl_dist.data.storage.local import LocalStorage
from txl_dist.data.storage.ranges import RangeStorage
from txl_dist.data.storage.remote import PipeOrigin, UrlOrigin
from txl_dist.errors import DataError
from txl_dist.io.files import path_of


def open_storage(
    location: str | Path, *, cache_dir: str, cache_gib: float, retries: int, allow_protocols: Sequence[str]
) -> Storage:
    """Open the storage of a corpus in a folder or at a URL. The other arguments are settings of the section `data`.

    Raises DataError if the scheme of the URL is not allowed or needs a package that is not installed, or if the cache
    folder cannot be used.
    """
    url = str(location)
    if re.match(r"[\w+.-]+(://|::)|pipe:", url) is None:
        return LocalStorage(path_of(location))
    protocol = check_protocol(url, allow=allow_protocols)
    if protocol == "file":
        return LocalStorage(Path(url.removeprefix("file://")))
    if protocol == "pipe" and not cache_dir:
        raise DataError(
            f"{url}: a `pipe:` command can read only whole files. Set data.cache_dir to a folder that keeps the "
            "downloaded shards."
        )
    if not cache_dir:
        return RangeStorage(UrlOrigin(url, allow=allow_protocols), retries=retries)
    origin = PipeOrigin(url) if protocol == "pipe" else UrlOrigin(url, allow=allow_protocols)
    return CachedStorage(
        origin,
        folder=Path(cache_dir).expanduser(),
        max_bytes=int(cache_gib * 2**30),
        retries=retries,
    )
