"""`txl doctor`: check the versions, devices, memory, disks and networks of machines before a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from txl_dist.cli.parsing import announce_ranks
from txl_dist.console.echo import echo
from txl_dist.errors import ConfigError


def doctor(run_dir: Path = Path("runs"), data: str = "", timeout_s: int = 60, json: Path | None = None) -> None:
    """Check this machine, or under a launcher all nodes and their network. Exit code 1 means that a run would fail.

    Command under a launcher: deepspeed [--hostfile H] --module txl_dist doctor.

    Args:
        run_dir: Folder of one or several runs, whose disk is tested. The folder need not exist.
        data: Folder or URL of a corpus to check too.
        timeout_s: Seconds to wait for other ranks. Missing ranks are then named.
        json: Write the results to this file as JSON.
    """
    if timeout_s < 1:
        raise ConfigError(f"--timeout-s {timeout_s}: it must be 1 second or more.")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        echo("txl doctor: checking this machine. This takes some seconds.", to=sys.stderr)
    announce_ranks()
    from dataclasses import asdict
    from json import dumps

    from txl_dist.io.files import write_output
    from txl_dist.planning.doctor.doctor import examine

    report = examine(run_dir=run_dir, data=data, timeout_s=timeout_s)
    if report is None:
        return  # another rank prints the report and exits for the job
    num_problems = report.count("problem")
    echo("\n".join(report.lines()))
    if json is not None:
        facts = asdict(report) | {"problems": num_problems}
        text = dumps(facts, indent=1, allow_nan=False)
        write_output(json, text.encode() + b"\n")
    if num_problems:
        raise SystemExit(1)
