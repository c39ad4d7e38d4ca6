"""Agents whose ranks are forked and not executed, so that they need not import torch.

`txl train --recover.spares 1` replaces its process by an agent, which starts Python anew for its rank and its spare.
Here the agent is a forked process that has everything imported, and forks them. All else is the agent's own code.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback

from tests.helpers.forked import run_txl
from txl_dist.cli.main import _train_arguments, agent_options
from txl_dist.distributed.recovery.agent import SIGNALS, Agent
from txl_dist.distributed.recovery.seat import SEAT, Seat


class Forked:
    """A child of an agent, forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def run_supervised(*words: str) -> None:
    """A function to start: `txl words` as the child of an agent."""

    def start(seat: Seat) -> Forked:
        pid = os.fork()
        if pid:
            return Forked(pid)
        signal.set_wakeup_fd(-1)  # of the agent
        os.closerange(3, 256)  # of the agent; else its peers would not notice its end
        for number in (*SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.environ[SEAT] = seat.to_json()
        try:
            run_txl(*words)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        os._exit(1)

    options = agent_options(_train_arguments(list(words[1:])).settings)
    code = Agent(start, options).run()
    sys.stdout.flush()
    os._exit(code)
