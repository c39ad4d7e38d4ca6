"""The status page of a rank, which its agent and its replacement share."""

from __future__ import annotations

import os

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
