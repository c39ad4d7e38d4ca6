"""Readers of cached shards that run in processes of their own. The module imports little, so they start at once."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

from txl_dist.data.format import ShardInfo
from txl_dist.data.storage.cache import CachedStorage
from txl_dist.data.storage.factory import open_storage

GIB = 2**30


def storage_of(url: str, cache: Path, *, max_bytes: int = GIB, retries: int = 2) -> CachedStorage:
    cache_gib = max_bytes / GIB
    storage = open_storage(url, cache_dir=str(cache), cache_gib=cache_gib, retries=retries, allow_protocols=())
    assert isinstance(storage, CachedStorage)
    return storage


def hold_shard(url: str, cache: Path, max_bytes: int, info: ShardInfo, connection: Any) -> None:
    """Open a shard, send that it is open, and keep it open until a message arrives."""
    storage = storage_of(url, cache, max_bytes=max_bytes)
    connection.send("begin")
    payload = storage.open_payload(info)
    connection.send(hashlib.sha256(payload.read(0, info.bytes)).hexdigest())
    connection.recv()


def evict_by_turns(url: str, cache: Path, max_bytes: int, infos: list[ShardInfo], seed: int, connection: Any) -> None:
    """Open shards of a cache that is too small for all of them, 60 times, and send how many were wrong."""
    storage = storage_of(url, cache, max_bytes=max_bytes)
    generator = random.Random(seed)
    wrong = 0
    for _ in range(60):
        info = generator.choice(infos)
        storage.prefetch(generator.choices(infos, k=2))
        wrong += hashlib.sha256(storage.open_payload(info).read(0, info.bytes)).hexdigest() != info.sha256
    connection.send(wrong)
