"""The status page of a rank, which its agent and its replacement share."""

from __future__ import annotations

import os
import subprocess
import sys

from txl_dist.distributed.recovery.status import StatusPage


def test_a_replacement_that_has_not_begun_is_neither_silent_nor_at_the_step_of_its_predecessor() -> None:
    page = StatusPage(os.memfd_create("status"))
    page.clear()
    assert page.read().silent_s < 60  # and not the time since the machine has started
    page.set_limit(5.0)
    page.progress(step=7, phase="step")
    page.clear()
    status = page.read()
    assert (status.step, status.phase, status.limit_s) == (0, "begin", 0.0)


WRITER = """
import sys
from txl_dist.distributed.recovery.status import StatusPage
page = StatusPage(sys.argv[1])
is_first = True
while True:
    page.progress(step=1234, phase="step")
    page.heartbeat(is_waiting=True)
    page.set_limit(9.0)
    if is_first:
        print("ready", flush=True)
    is_first = False
"""


def test_a_reader_never_sees_a_number_that_is_half_written() -> None:
    descriptor = os.memfd_create("status")
    page = StatusPage(descriptor)
    command = [sys.executable, "-c", WRITER, f"/proc/{os.getpid()}/fd/{descriptor}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        statuses = [page.read() for _ in range(100_000)]  # one in a hundred was wrong with struct.pack_into
        writer.kill()
    assert {(status.step, status.limit_s, status.is_waiting) for status in statuses} == {(1234, 9.0, True)}
    assert max(max(status.idle_s, status.silent_s) for status in statuses) < 60
