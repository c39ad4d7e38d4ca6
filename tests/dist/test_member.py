"""A rank whose collective cannot be ended after a loss kills itself, so that it is replaced within a second."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import types
from pathlib import Path

import pytest

from tests.helpers import forked
from txl_dist.distributed.recovery.seat import SEAT, Seat
from txl_dist.distributed.recovery.status import PAGE_BYTES

pytestmark = pytest.mark.dist


def wait_in(module: str, seconds: float) -> None:
    """Join an agent as a rank, and then wait inside a function of this module."""
    from txl_dist.train.monitoring.member import join_agent

    member = join_agent()
    assert member is not None
    place = types.ModuleType(module)
    exec("import time\ndef collective(seconds):\n    time.sleep(seconds)", place.__dict__)
    place.collective(seconds)
    os._exit(7)


@pytest.mark.parametrize(
    ("module", "seconds", "exit_code"),
    [("torch.distributed.pretended", 60.0, -signal.SIGKILL), ("pretended.loader", 3.0, 7)],
)
def test_a_rank_whose_collective_survives_the_cut_kills_itself(
    module: str, seconds: float, exit_code: int, tmp_path: Path
) -> None:
    page = os.memfd_create("status")
    os.ftruncate(page, PAGE_BYTES)
    address = f"{tmp_path.name}-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{address}")
        listener.listen()
        # This test is the agent. The process is a child of another one, so it is a replacement: it waits for a plan.
        seat = Seat(address, os.getpid(), page, [], [], {})
        variables = forked.environment(**{SEAT: seat.to_json()}, **forked.place(1, 2, 1))
        process = forked.start(wait_in, module, seconds, variables=variables, out=tmp_path / "out.txt")
        agent, _ = listener.accept()
        with agent:
            plan = {"kind": "plan", "generation": 2, "losses": [], "repeat_until": 0, "began_s": time.monotonic()}
            agent.sendall(json.dumps(plan).encode() + b"\n")
            process.join(60)
    os.close(page)
    assert process.exitcode == exit_code, (tmp_path / "out.txt").read_text(encoding="utf-8")
