"""Everything to be known of one GPU, ten minutes at a time: `python -m tools.benchmarks.gpu --json FILE`.

    --run 1    is it right and how fast     device   ceilings of the device, what a launch costs
               (560 s)                      tests    tests/gpu: the Triton kernels beside their twin
                                            twins    attention, softmax, embedding, whole model beside fp64 on the CPU
                                            engine   ZeroEngine on enwik8_base: stages, types, graphs; losses and norms
                                            profile  where a step's time goes, eager and graphed
                                            sweep    score buffers and tiles of attention
                                            codes    the original (TF32), NVIDIA's code and ours, whole steps
    --run 2    how it compares              kernels  attention: ours, SDPA, FlexAttention with the term as score_mod
               (570 s)                      recipes  steps of the WikiText-103 recipes, ours and the peers'
    --run 3    does it train                curve    3,000 steps on real text beside the CPU's
               (570 s)                      resume   save and continue, bit for bit
                                            memcheck one kernel under compute-sanitizer

A section is a process of its own with a limit, and a list of jobs. Each row is on the disk the moment it is known. A
job that raises leaves a row that says so; one that kills the process, or takes too long, leaves such a row too, and the
section goes on behind it in a fresh process. Seconds that a section leaves are the next one's.
tools/experiments/notebook/gpu.md says what the rows mean and what to do with them.

`--only SECTION` (more than one may be given) measures a part; `--rehearse` runs everything tiny on a CPU, and
`--break SECTION=kill|raise|hang` shows what a job leaves that goes wrong: the first of that section does.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tools.benchmarks.gpu_rows import Journal, entries, print_rows, rows

FAULTS = ("kill", "raise", "hang")
PROGRAM = (sys.executable, "-m", "tools.benchmarks.gpu")
SPOILED = 3
"""A child's exit status: its device context is of no use after an error; the jobs that are left want a fresh one."""


class Section(NamedTuple):
    """A process and its limits, in seconds."""

    name: str
    limit_s: float
    job_s: float
    """Of one of its jobs: when that hangs, the others have the rest."""


RUNS = {
    1: (
        Section("device", 40, 25),
        Section("tests", 90, 40),
        Section("twins", 60, 30),
        Section("engine", 120, 50),
        Section("profile", 90, 60),
        Section("sweep", 60, 25),
        Section("codes", 100, 50),
    ),
    2: (Section("kernels", 230, 60), Section("recipes", 340, 70)),
    3: (Section("curve", 330, 325), Section("resume", 190, 90), Section("memcheck", 50, 45)),
}
CLOSING_S = 1.0
"""Of the time of a run: for the last row and the tables."""


def main() -> int:
    """See the module's docstring. A section without a GPU is a row that says so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=int, choices=RUNS, default=1)
    parser.add_argument("--peer-original", type=Path, metavar="DIR", help="folder `pytorch` of the authors' code")
    parser.add_argument("--peer-nvidia", type=Path, metavar="DIR", help="folder `pytorch` of NVIDIA's code")
    parser.add_argument("--only", action="append", default=[], metavar="SECTION", help="may be given more than once")
    parser.add_argument("--seconds", type=float, default=575.0, help="what has not begun by then is left out")
    parser.add_argument("--job-seconds", type=float, default=0.0, help="limit of each job, in place of its section's")
    parser.add_argument("--json", type=Path, default=Path("gpu.jsonl"), metavar="FILE", help="rows are added to it")
    parser.add_argument("--rehearse", action="store_true", help="tiny and on a CPU, to try the program")
    parser.add_argument("--break", dest="faults", action="append", default=[], metavar="SECTION=FAULT")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--skip", action="append", default=[], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sections = RUNS[arguments.run]
    if unknown := set(arguments.only) - {section.name for section in sections}:
        known = ", ".join(section.name for section in sections)
        parser.error(f"--only {' '.join(sorted(unknown))}: run {arguments.run} has the sections {known}")
    if any(fault.partition("=")[2] not in FAULTS for fault in arguments.faults):
        parser.error(f"--break wants SECTION=FAULT, the faults are {', '.join(FAULTS)}")
    if arguments.child:
        return child(arguments)
    return measure(arguments, [one for one in sections if not arguments.only or one.name in arguments.only])


def measure(arguments: argparse.Namespace, sections: list[Section]) -> int:
    """All sections, as far as the time goes; then the tables."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `timeout` sends it; the child is killed on the way out
    began, due_s = time.time(), 0.0
    facts = {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d %H:%M:%S")}
    Journal(arguments.json, section="", began=began).opens(facts)
    for section in sections:
        due_s += section.limit_s
        ends = began + min(due_s, arguments.seconds - CLOSING_S)
        journal = Journal(arguments.json, section=section.name, began=began)
        run_section(section, journal, ends=ends, job_s=arguments.job_seconds or section.job_s)
        found = rows(arguments.json, began=began).get(section.name, [])
        errors = sum("error" in row for row in found)
        print(f"{time.time() - began:6.0f} s  {section.name}: {len(found)} rows, {errors} errors", flush=True)
    print_rows(arguments.json, began=began)
    return 0


def run_section(section: Section, journal: Journal, *, ends: float, job_s: float) -> None:
    """In processes that each go on where the one before was lost. What was lost becomes a row."""
    path, begun = journal.path, list[str]()
    while True:
        if ends - time.time() < 3 and begun:
            break
        words = run_child(section.name, journal, begun, ends=ends, job_s=job_s)
        told = list(entries(path, began=journal.began, section=section.name))
        planned: list[str] = next((entry["jobs"] for entry in told if entry.get("state") == "plans"), [])
        began_now = [entry["job"] for entry in told if entry.get("state") == "begins"]
        ended = {entry["job"] for entry in told if entry.get("state") == "ends"}
        for job in began_now:
            if job not in ended:
                journal.row(job, {"error": words or "its process ended"})
                journal.ends(job)
        if words and not (set(began_now) - set(begun)):
            journal.row("start", {"error": words})  # no job was reached: another try would not reach one either
            return
        begun = began_now
        if not words or set(begun) >= set(planned):
            return
    for job in planned:
        if job not in begun:
            journal.row(job, {"error": "no time was left"})


def run_child(name: str, journal: Journal, skip: list[str], *, ends: float, job_s: float) -> str:
    """One process. Returns why it did not reach the end of its jobs; empty if it did."""
    marks = [word for job in skip for word in ("--skip", job)]
    command = [*PROGRAM, *sys.argv[1:], "--child", name, "--began", repr(journal.began), *marks]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL, start_new_session=True)
        why, last, since = "", 0, time.time()
        try:
            while process.poll() is None and not why:
                time.sleep(0.1)
                told = sum("state" in entry for entry in entries(journal.path, began=journal.began, section=name))
                if told != last:
                    last, since = told, time.time()
                if time.time() > ends:
                    why = "the section's time ended"
                elif time.time() - since > job_s:
                    why = f"took longer than {job_s:.0f} s"
        finally:
            kill_group(process)  # also what it has started and left behind, or if this process is to end
        if why:
            return why
        if process.returncode == 0:
            return ""
        said.seek(0)
        lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
        if process.returncode < 0:
            return f"killed by {signal.Signals(-process.returncode).name}. {(lines or [''])[-1][:200]}".strip()
        return (lines or [f"exit status {process.returncode}"])[-1][:300]


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """The process and what it started. One that hangs in the driver may not die: it is not waited for."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=5)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass


def child(arguments: argparse.Namespace) -> int:
    """The jobs of a section that are left, in this process."""
    journal = Journal(arguments.json, section=arguments.child, began=arguments.began, skip=arguments.skip)
    fault = dict(fault.split("=") for fault in arguments.faults).get(arguments.child, "")
    if arguments.rehearse:
        os.environ |= {"TRITON_INTERPRET": "1", "DS_ACCELERATOR": "cpu"}  # Triton reads it when it is imported
    import torch

    from tools.benchmarks.gpu_jobs import Setting, work

    if arguments.run == 1:
        from tools.benchmarks.gpu_sections import SECTIONS
    else:
        from tools.benchmarks.gpu_later import SECTIONS

    if arguments.rehearse:
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        print("gpu: torch finds no GPU here; --rehearse tries the program on a CPU", file=sys.stderr)
        return 1
    peers = {"original": arguments.peer_original, "nvidia": arguments.peer_nvidia}
    setting = Setting("cpu" if arguments.rehearse else "cuda", arguments.rehearse, peers, fault)
    is_sound = work(SECTIONS[arguments.child], setting, journal)
    return 0 if is_sound else SPOILED


if __name__ == "__main__":
    sys.exit(main())
