"""Choice of a corpus's storage by its location.

    folder                 shards are mapped into memory, nothing is copied: local.py
    URL, cache_dir set     a whole shard is downloaded once per node, checked by size and sha256, then mapped: cache.py
    URL, no cache_dir      the bytes of one document at a time, in ranges: ranges.py
    pipe:COMMAND {file}    as a URL with cache_dir, by a shell command; only if data.allow_protocols names pipe

Readers see one interface, `Storage`.
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
    """Open the storage of a folder or URL. The values are those of the settings `data` with these names.

    Raises DataError for a URL whose scheme is not allowed or lacks its package, and for a cache that cannot be used.
    """
    url = str(location)
    if re.match(r"[\w+.-]+(://|::)|pipe:", url) is None:
        return LocalStorage(path_of(location))
    protocol = check_protocol(url, allow=allow_protocols)
    if protocol == "file":
        return LocalStorage(Path(url.removeprefix("file://")))
    if protocol == "pipe" and not cache_dir:
        raise DataError(
            f"{url}: a command can only read whole files. Set data.cache_dir, so that downloaded shards are kept there."
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
