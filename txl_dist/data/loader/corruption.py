"""Policy for damaged documents: they end the run, or their tokens are replaced, up to a maximum number."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from txl_dist.errors import DataError, UnreachableError

logger = logging.getLogger("txl_dist")


class CorruptionPolicy:
    """Decides whether a damaged document ends the run or is skipped, and counts the skipped documents of this rank.

    With `skip` at most `max_skipped` documents may be skipped. Without `skip` every damaged document raises an error.
    """

    def __init__(self, *, skip: bool = False, max_skipped: int = 0) -> None:
        self._skip = skip
        self._max_skipped = max_skipped
        self._num_ranks = 1
        """Number of ranks that have read the lanes of this rank, each with `max_skipped` of its own, before the job
        continued with fewer ranks."""
        self._skipped: set[tuple[str, int]] = set()
        self.num_skipped = 0
        """Number of different documents that this rank has skipped since it started. If a shard cannot be opened, all
        of its documents count."""

    def skipped(self) -> list[Any]:
        """Return the number of skipped documents, these documents, and the number of ranks that have skipped them, as
        values for JSON. `continue_from` takes them."""
        return [self.num_skipped, sorted(self._skipped), self._num_ranks]

    def continue_from(self, skipped: Sequence[Any]) -> None:
        """Continue the count of another process, or of several ranks together, after the loss of a rank."""
        self.num_skipped, documents, self._num_ranks = skipped
        self._skipped = {(shard, document) for shard, document in documents}

    def skip(self, error: DataError, *, shard: str, document: int, count: int = 1) -> None:
        """Count and log one damaged document. With `document` -1, count all `count` documents of a shard that cannot be
        opened.

        Raises DataError if skipping is not allowed, or if more than `max_skipped` documents would be skipped. Raises
        `error` unchanged if the file cannot be reached, because an unreachable file is not damaged.
        """
        if not self._skip or isinstance(error, UnreachableError):
            raise error
        if (shard, document) in self._skipped:
            return
        limit = self._max_skipped * self._num_ranks
        if self.num_skipped + count > limit:
            each = f" for each of {self._num_ranks} ranks" if self._num_ranks > 1 else ""
            raise DataError(
                f"{error} The damage is not skipped, because this rank would then have skipped "
                f"{self.num_skipped + count} documents in all, more than data.max_skipped={self._max_skipped}{each}. "
                "To skip the damage, raise data.max_skipped."
            ) from error
        self._skipped.add((shard, document))
        self.num_skipped += count
        logger.warning("damaged documents skipped: %d of at most %d. %s", self.num_skipped, limit, error)
