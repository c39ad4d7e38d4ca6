"""Fault injection: an ordered fault occurs once at its place, and no fault occurs without an order, in separate
processes."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from txl_dist.fault_injection import KINDS, Fault, parse_faults

PROGRAM = """
from txl_dist.fault_injection import failpoint
for step in (1, 2):
    for phase in ("step", "save-file", "save-file"):
        try:
            print(step, phase, failpoint(phase, step=step) or "-", flush=True)
        except (OSError, RuntimeError) as error:
            print(step, phase, repr(error), flush=True)
"""
NOTHING = [f"{step} {phase} -" for step in (1, 2) for phase in ("step", "save-file", "save-file")]


def start(orders: str, program: str = PROGRAM, *, rank: str = "1") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"RANK": rank, "TXL_FAILPOINTS": orders},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(orders: str, *, rank: str = "1") -> tuple[list[str], list[str], int]:
    """(lines, what was announced, exit code)."""
    process = start(orders, rank=rank)
    out, err = process.communicate(timeout=60)
    return out.splitlines(), [line.split(" time ")[0] for line in err.splitlines()], process.returncode


def test_nothing_happens_unordered() -> None:
    for orders in ("", "kill:0:1", "nan:1:3", "hang:1:1:prune", "raise:1:1:save-file#3"):
        assert run(orders) == (NOTHING, [], 0)


def test_what_the_caller_acts_on_is_returned_once() -> None:
    lines, announced, _ = run("nan:1:2,spike:1:1:save-file")
    assert lines == [*NOTHING[:1], "1 save-file spike", "1 save-file -", "2 step nan", *NOTHING[4:]]
    assert announced == [
        "TXL_FAILPOINTS spike rank 1 step 1 phase save-file",
        "TXL_FAILPOINTS nan rank 1 step 2 phase step",
    ]


def test_a_fault_may_wait_for_the_second_time() -> None:
    lines, _, _ = run("flip:1:1:save-file#2")
    assert [line for line in lines if line not in NOTHING] == ["1 save-file flip"]
    assert lines.index("1 save-file flip") == 2


def test_a_star_matches_every_rank_step_and_phase() -> None:
    lines, _, _ = run("skip:*:*:*")
    assert lines == ["1 step skip", *NOTHING[1:]]


def test_a_trace_lists_every_point_and_hides_no_other_fault() -> None:
    lines, announced, _ = run("trace:*:*:*,inf:1:2:step", rank="1")
    assert lines == [*NOTHING[:3], "2 step inf", *NOTHING[4:]]
    traced = [f"TXL_FAILPOINTS trace rank 1 step {line[0]} phase {line[2:-2]}" for line in NOTHING]
    assert [line for line in announced if "trace" in line] == traced


def test_errors_of_the_file_system_and_of_nobody_are_raised() -> None:
    lines, _, _ = run("enospc:1:1,eio:1:1:save-file,raise:1:2")
    assert "OSError(28" in lines[0]
    assert "OSError(5" in lines[1]
    assert "RuntimeError" in lines[3]


@pytest.mark.parametrize(("kind", "number"), [("kill", signal.SIGKILL), ("term", signal.SIGTERM)])
def test_a_signal_ends_the_process_at_the_point(kind: str, number: int) -> None:
    assert run(f"{kind}:1:1:save-file") == (
        NOTHING[:1],
        [f"TXL_FAILPOINTS {kind} rank 1 step 1 phase save-file"],
        -number,
    )


@pytest.mark.parametrize(("kind", "status"), [("stop", psutil.STATUS_STOPPED), ("hang", psutil.STATUS_SLEEPING)])
def test_a_frozen_process_stays_where_it_is(kind: str, status: str) -> None:
    process = start(f"{kind}:1:1:save-file")
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.readline() == "1 step -\n"
        assert process.stderr.readline().startswith(f"TXL_FAILPOINTS {kind} rank 1")
        end_s = time.monotonic() + 30
        while psutil.Process(process.pid).status() != status:
            assert time.monotonic() < end_s
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_spinning_process_holds_the_interpreter_through_signals() -> None:
    """A Python handler of the signal would run, and end the process, if the interpreter were free for a moment."""
    handler = "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
    process = start("spin:1:1:save-file", handler + PROGRAM)
    assert process.stderr is not None
    try:
        assert process.stderr.readline().startswith("TXL_FAILPOINTS spin rank 1")
        time.sleep(0.5)  # it is announced just before
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("orders", ["kil:0:1", "kill:0", "kill:x:1", "kill:0:1.5", "kill:0:1:step:more", "nan:0:1:a#b"])
def test_a_misspelt_order_is_refused(orders: str) -> None:
    with pytest.raises(ValueError):
        parse_faults(orders)


def test_orders_are_read_as_written() -> None:
    assert parse_faults("kill:0:12:save-file#3,,nan:*:7") == [
        Fault("kill", "0", "12", "save-file", 3),
        Fault("nan", "*", "7", "step", 1),
    ]
    assert len(set(KINDS)) == len(KINDS) == 15
