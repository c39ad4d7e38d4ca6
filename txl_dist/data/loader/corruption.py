"""Policy for documents that cannot be read: the run ends, or their tokens are replaced, up to a maximum number."""

from __future__ import annotations

import logging

from txl_dist.errors import DataError, UnreachableError

logger = logging.getLogger("txl_dist")


class CorruptionPolicy:
    """Permission to skip damaged documents, and the number that this rank has skipped since it started."""

    def __init__(self, *, skip: bool = False, max_skipped: int = 0) -> None:
        self._skip = skip
        self._max_skipped = max_skipped
        self._skipped: set[tuple[str, int]] = set()
        self.num_skipped = 0
        """Number of different documents; those of a shard that cannot be opened all count."""

    def skip(self, error: DataError, *, shard: str, document: int, count: int = 1) -> None:
        """Count and log a damaged document, or all `count` of a shard (document -1).

        Raises DataError if it may not be skipped. Raises `error` if its file cannot be reached: that is not damage.
        """
        if not self._skip or isinstance(error, UnreachableError):
            raise error
        if (shard, document) in self._skipped:
            return
        if self.num_skipped + count > self._max_skipped:
            raise DataError(
                f"{error} If this damage is skipped too, this rank has skipped {self.num_skipped + count} damaged "
                f"documents, but data.max_skipped={self._max_skipped}."
            ) from error
        self._skipped.add((shard, document))
        self.num_skipped += count
        logger.warning("skipped %d damaged of at most %d: %s", self.num_skipped, self._max_skipped, error)
