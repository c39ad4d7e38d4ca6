"""Everything to be known of one GPU, in one command and under 20 minutes: `python tools/bench_gpu.py --json FILE
--peer-original DIR --peer-nvidia DIR`.

    ceilings     copy GB/s, bf16 product TFLOP/s              kernels    attention alone: ours, SDPA, FlexAttention
    exact        kernels beside fp64, eight shapes            precision  fp32, bf16 and fp16 trained side by side
    step:RECIPE  enwik8 base and large, wt103 base (NVIDIA's sizes) and large; a run per code

Each section, and in `step` each code, is a process of its own with a limit on its time: a failure is recorded with its
last words, and the rest goes on. The file is written after each. `--only step:enwik8_base` (more than one may be
given) measures a part; later runs with the same file add to it. `--rehearse` runs everything tiny on a CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_sections import CODES, RECIPES, Row, ceilings, exact, kernels, precision, step
from measuring import print_table, without_nan

CONFIGS = Path(__file__).parents[1] / "configs"
PLAIN_SECTIONS = {"ceilings": ceilings, "exact": exact, "kernels": kernels, "precision": precision}
LONGEST_S = {"ceilings": 60, "exact": 150, "kernels": 300, "precision": 240}
LONGEST_STEP_S = 90


def jobs(only: list[str]) -> Iterator[tuple[str, str]]:
    """(section, code or empty) in the order in which they are most worth having."""
    wanted = [("ceilings", ""), ("exact", ""), ("kernels", "")]
    wanted += [(f"step:{recipe}", code) for recipe in RECIPES for code in reversed(CODES)]
    wanted += [("precision", "")]
    return ((section, code) for section, code in wanted if not only or section in only or section.split(":")[0] in only)


def run_job(section: str, code: str, *, limit_s: float) -> list[Row]:
    """In a fresh process. What went wrong becomes a row."""
    command = [sys.executable, *sys.argv, "--child", section, "--code", code]
    label = {"recipe": section.partition(":")[2], "code": code} if code else {"what": section}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return [{**label, "error": f"took longer than {limit_s:.0f} s"}]
    if done.returncode != 0:
        words = [line for line in done.stderr.splitlines() if line.strip()]
        return [{**label, "error": (words or [f"exit code {done.returncode}"])[-1][:300]}]
    rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return rows


def child(arguments: argparse.Namespace) -> list[Row]:
    """One job, in this process."""
    device = "cpu" if arguments.rehearse else "cuda"
    if arguments.rehearse:
        torch.set_num_threads(1)
    section, _, recipe = arguments.child.partition(":")
    if section != "step":
        return PLAIN_SECTIONS[section](device=device, rehearse=arguments.rehearse)
    peers = {"original": arguments.peer_original, "nvidia": arguments.peer_nvidia}
    return step(recipe, arguments.code, device=device, rehearse=arguments.rehearse, configs=CONFIGS, peers=peers)


def aligned(rows: list[Row]) -> list[dict[str, Any]]:
    """The same columns in every row."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return [{column: row.get(column, "") for column in columns} for row in rows]


def measure(arguments: argparse.Namespace) -> dict[str, list[Row]]:
    """All jobs, as far as the time goes; the file is whole after each."""
    began, tables = time.monotonic(), dict[str, list[Row]]()
    if arguments.json and arguments.json.exists():
        tables = json.loads(arguments.json.read_text(encoding="utf-8"))["tables"]
    fresh: set[str] = set()
    for section, code in jobs(arguments.only):
        left_s = 60 * arguments.minutes - (time.monotonic() - began)
        limit_s = min(left_s, LONGEST_S.get(section, LONGEST_STEP_S))
        rows = run_job(section, code, limit_s=limit_s) if left_s > 5 else [{"code": code, "error": "no time was left"}]
        tables[section] = (tables[section] if section in fresh else []) + rows
        fresh.add(section)
        print(f"{time.monotonic() - began:6.0f} s  {section} {code}  {rows[-1].get('error', '')}", flush=True)
        if arguments.json:
            name = "cpu" if arguments.rehearse else torch.cuda.get_device_name()
            content = {"device": name, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "tables": tables}
            arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return tables


def main() -> int:
    """See the module's docstring. Returns 1 if there is no GPU to measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-original", type=Path, metavar="DIR", help="folder `pytorch` of the authors' code")
    parser.add_argument("--peer-nvidia", type=Path, metavar="DIR", help="folder `pytorch` of NVIDIA's code")
    parser.add_argument("--only", action="append", default=[], metavar="SECTION", help="may be given more than once")
    parser.add_argument("--minutes", type=float, default=19.0, help="what has not begun by then is left out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after each section, and added to")
    parser.add_argument("--rehearse", action="store_true", help="tiny and on a CPU, to try the program")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--code", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    known = {section.split(":")[0] for section, _ in jobs([])} | {section for section, _ in jobs([])}
    if unknown := set(arguments.only) - known:
        parser.error(f"--only {' '.join(sorted(unknown))}: the sections are {', '.join(sorted(known))}")
    if not arguments.rehearse and not torch.cuda.is_available():
        print("bench_gpu: there is no GPU here; --rehearse tries the program on a CPU", file=sys.stderr)
        return 1
    if arguments.child:
        print(json.dumps(without_nan(child(arguments))))
        return 0
    for section, rows in measure(arguments).items():
        print_table(section, aligned(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
