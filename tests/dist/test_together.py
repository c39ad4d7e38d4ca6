"""Ranks decide together: no rank waits for a rank that has given up."""

from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks
from txl_dist.distributed.collectives import RankInfo, broadcast_object, run_on_all_ranks, run_on_rank0
from txl_dist.errors import DataError, TxlError

pytestmark = pytest.mark.dist


def failing_worker(ranks: RankInfo) -> list[str]:
    def fail(error: Exception) -> int:
        if ranks.rank == 1:
            raise error
        return ranks.rank

    seen = []
    for error in (DataError("shard 7 is gone"), ZeroDivisionError("a defect")):
        try:
            run_on_all_ranks(lambda error=error: fail(error))
        except Exception as caught:  # noqa: BLE001  any kind is reported
            rank = caught.rank if isinstance(caught, TxlError) else None
            seen.append(f"{type(caught).__name__} {caught} {rank}")
    try:
        run_on_rank0(lambda: 1 // 0)
    except Exception as caught:  # noqa: BLE001  any kind is reported
        seen.append(type(caught).__name__)
    seen.append(
        f"{run_on_all_ranks(lambda: ranks.rank * 10)} {run_on_rank0(lambda: 'first')} {broadcast_object(ranks.rank)}"
    )
    return seen


def test_an_error_on_one_rank_is_an_error_on_all_and_names_it(tmp_path: Path) -> None:
    first, second = run_ranks(failing_worker, world_size=2, folder=tmp_path)
    assert first[0] == second[0] == "DataError shard 7 is gone 1"
    assert first[1] == "TxlError rank 1 failed: ZeroDivisionError('a defect'). 1"
    assert second[1] == "ZeroDivisionError a defect None", "where it happened it stays what it is"
    assert (first[2], second[2]) == ("ZeroDivisionError", "TxlError")
    assert (first[3], second[3]) == ("0 first 0", "10 first 0")
