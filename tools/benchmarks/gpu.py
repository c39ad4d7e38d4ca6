"""Measure everything about one GPU, in runs of ten minutes: `python -m tools.benchmarks.gpu --json FILE`.

    --run 1    correctness and speed        device   limits of the device, cost of a launch
               (525 s)                      steps    ZeroEngine on enwik8_base, eager and graphed: losses, norms, times
                                            tests    tests/gpu: the Triton kernels against the same code on the CPU
                                            twins    attention, softmax, embedding, whole model against fp64 on the CPU
                                            engine   the same steps at other stages, in other types, and graphed
                                            profile  time of a step by kernel, without and with CUDA graphs
                                            sweep    score buffers and tiles of attention
                                            codes    whole steps of the original (TF32), of NVIDIA's code and of ours
    --run 2    comparison                   kernels  attention: ours, SDPA, FlexAttention with the term as score_mod
               (535 s)                      recipes  steps of the WikiText-103 recipes, ours and the other codes'
    --run 3    training                     curve    3,000 steps on real text, compared with the CPU
               (535 s)                      resume   save and resume, equal bit for bit
                                            memcheck one kernel under compute-sanitizer

A section is a separate process with a time limit and a list of jobs. Each row is written to the disk as soon as it is
measured. A job that raises an error leaves a row with the first and the last line of the error. The whole error is in
FILE.log, with everything that the sections print. A job that kills the process or exceeds its limit leaves such a row
too, and the section continues with the next job in a new process. A later section can use the seconds that a section
did not use. tools/experiments/notebook/gpu.md explains the rows and what to do with them.

`--only SECTION` (can be repeated) measures a part. `--rehearse` runs everything with tiny sizes on a CPU. `--break
SECTION=kill|raise|hang` makes the first job of that section fail in this way, to show what a failed job leaves.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tools.benchmarks.gpu_rows import Journal, entries, print_rows, rows
from txl_dist.errors import first_and_last_line

ROOT = Path(__file__).parents[2]
FAULTS = ("kill", "raise", "hang")
PROGRAM = (sys.executable, "-m", "tools.benchmarks.gpu")
SPOILED = 3
"""Exit status of a child whose device context is unusable after an error. The remaining jobs need a new process."""


class Section(NamedTuple):
    """A section of a run with its time limits in seconds."""

    name: str
    limit_s: float
    job_s: float
    """Time limit of one job of the section. If a job hangs, the other jobs have the rest of the section's time."""


RUNS = {
    1: (
        Section("device", 40, 25),
        Section("steps", 50, 45),
        Section("tests", 65, 30),
        Section("twins", 50, 25),
        Section("engine", 110, 50),
        Section("profile", 60, 50),
        Section("sweep", 50, 20),
        Section("codes", 100, 50),
    ),
    2: (Section("kernels", 215, 60), Section("recipes", 320, 70)),
    3: (Section("curve", 310, 305), Section("resume", 175, 85), Section("memcheck", 50, 45)),
}
CALL_S = 540.0
"""Seconds of a run. A call of ten minutes also installs wheels, imports torch and copies files."""
CLOSING_S = 1.0
"""Seconds of a run that are reserved for the last row and the tables."""


def main() -> int:
    """Measure the chosen run or its sections. A section without a GPU leaves a row that says so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=int, choices=RUNS, default=1)
    parser.add_argument("--peer-original", type=Path, metavar="DIR", help="folder `pytorch` of the authors' code")
    parser.add_argument("--peer-nvidia", type=Path, metavar="DIR", help="folder `pytorch` of NVIDIA's code")
    parser.add_argument(
        "--only", action="append", default=[], metavar="SECTION", help="measure only this section; can be repeated"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=CALL_S,
        help=f"jobs that have not begun after this many seconds are skipped; above {CALL_S:.0f}, all limits grow in "
        "proportion, for a slow machine",
    )
    parser.add_argument(
        "--job-seconds", type=float, default=0.0, help="time limit of each job; 0 means the limit of its section"
    )
    parser.add_argument(
        "--json", type=Path, default=Path("gpu.jsonl"), metavar="FILE", help="file to which rows are appended"
    )
    parser.add_argument(
        "--commit", default="", help="commit of the checkout, for a copy without .git; by default git is asked"
    )
    parser.add_argument("--rehearse", action="store_true", help="run with tiny sizes on a CPU, to try the program")
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
        parser.error(f"--break must be SECTION=FAULT; the faults are {', '.join(FAULTS)}")
    if arguments.child:
        return child(arguments)
    return measure(arguments, [one for one in sections if not arguments.only or one.name in arguments.only])


def measure(arguments: argparse.Namespace, sections: list[Section]) -> int:
    """Run all sections until the time is used up, then print the tables."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `timeout` sends SIGTERM; the child is killed at exit
    began, due_s, pace = time.time(), 0.0, max(1.0, arguments.seconds / CALL_S)
    facts = {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d %H:%M:%S")}
    commit = arguments.commit or said_by("git", "rev-parse", "HEAD")
    facts |= {"commit": commit, "device": said_by("nvidia-smi", "-L")}
    Journal(arguments.json, section="", began=began).opens(facts)
    for section in sections:
        due_s += pace * section.limit_s
        ends = began + min(due_s, arguments.seconds - CLOSING_S)
        journal = Journal(arguments.json, section=section.name, began=began)
        run_section(section, journal, ends=ends, job_s=arguments.job_seconds or pace * section.job_s)
        found = rows(arguments.json, began=began).get(section.name, [])
        errors = sum("error" in row for row in found)
        print(f"{time.time() - began:6.0f} s  {section.name}: {len(found)} rows, {errors} errors", flush=True)
    print_rows(arguments.json, began=began)
    return 0


def said_by(*command: str) -> str:
    """Return what a program prints, or `unknown` if the program is missing or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def run_section(section: Section, journal: Journal, *, ends: float, job_s: float) -> None:
    """Run a section's jobs. If a process is lost, a new process continues with the next job, and the lost job gets a
    row with the error."""
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
            journal.row("start", {"error": words})  # no job began, so another process would not begin one either
            return
        begun = began_now
        if not words or set(begun) >= set(planned):
            return
    for job in planned:
        if job not in begun:
            journal.row(job, {"error": "no time was left"})


def run_child(name: str, journal: Journal, skip: list[str], *, ends: float, job_s: float) -> str:
    """Run one process of a section. Return why it did not finish its jobs, or an empty text if it did."""
    marks = [word for job in skip for word in ("--skip", job)]
    command = [*PROGRAM, *sys.argv[1:], "--child", name, "--began", repr(journal.began), *marks]

    def num_states() -> int:
        return sum("state" in entry for entry in entries(journal.path, began=journal.began, section=name))

    last = num_states()
    with journal.log.open("a+b") as said:
        begin = said.seek(0, os.SEEK_END)
        process = subprocess.Popen(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL, start_new_session=True)
        why, since = "", math.inf  # what the process imports is no job and has the section's limit
        try:
            while process.poll() is None and not why:
                time.sleep(0.1)
                told = num_states()
                if told != last:
                    last, since = told, time.time()
                if time.time() > ends:
                    why = "the section's time ended"
                elif time.time() - since > job_s:
                    why = f"took longer than {job_s:.0f} s"
        finally:
            kill_group(process)  # also kills processes that it started, and runs when this process ends
        if why:
            return why
        if process.returncode == 0:
            return ""
        said.seek(begin)
        words = first_and_last_line(said.read().decode(errors="replace"))
        if process.returncode < 0:
            return f"killed by {signal.Signals(-process.returncode).name}. {words}".strip()
        return words or f"exit status {process.returncode}"


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all processes that it started. A process that hangs in the driver is waited for at most 5
    s."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=5)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass


def child(arguments: argparse.Namespace) -> int:
    """Run the remaining jobs of a section in this process, and return the exit status."""
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
        print("gpu: torch finds no GPU on this machine. Type --rehearse to try the program on a CPU.", file=sys.stderr)
        return 1
    peers = {"original": arguments.peer_original, "nvidia": arguments.peer_nvidia}
    setting = Setting("cpu" if arguments.rehearse else "cuda", arguments.rehearse, peers, fault)
    is_sound = work(SECTIONS[arguments.child], setting, journal)
    return 0 if is_sound else SPOILED


if __name__ == "__main__":
    sys.exit(main())
