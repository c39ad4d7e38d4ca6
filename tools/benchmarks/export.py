"""Measure the memory of an export: `python -m tools.benchmarks.export SOURCE... [--dtypes fp32 bf16 fp16 int8]`.

Each source (a run, a checkpoint or a bundle) is exported in each type, in a new process. The figure is the process's
peak of resident memory (VmHWM of Linux: its own pages and those of mapped files) less the resident memory after the
program's imports. It is given as a share of the weights in the exported type. The figure includes the probe, the hashes
and the tokenizer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DTYPES = ("fp32", "bf16", "fp16", "int8")
MIB = 1 << 20


def measured(source: Path, dtype: str) -> dict[str, Any]:
    """Export in a new process. Return bytes of the weights, peak above the imports, seconds and the probe's error in
    nats."""
    command = [sys.executable, "-m", "tools.benchmarks.export", str(source), "--dtypes", dtype, "--once"]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    facts: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return facts


def measure(source: Path, dtype: str) -> dict[str, Any]:
    """Export in this process and return the figures that `measured` describes."""
    from txl_dist.convert.export import export_bundle

    imported = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        made = export_bundle(source, Path(folder) / "bundle", dtype=dtype)
    seconds = time.perf_counter() - begun
    return {
        "bytes": made.num_bytes,
        "share": made.share,
        "error": made.error,
        "seconds": seconds,
        "imported": imported,
        "peak": resident("VmHWM") - imported,
    }


def resident(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def main() -> None:
    """Read the command line, export each source in each type, and print a line for each export."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", type=Path, nargs="+")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument(
        "--once", action="store_true", help="export in this process; the last line of the output is JSON"
    )
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(measure(arguments.sources[0], arguments.dtypes[0])))
        return
    for source in arguments.sources:
        print(source)
        for dtype in arguments.dtypes:
            one = measured(source, dtype)
            print(
                f"  {dtype}  weights {one['bytes'] / MIB:6.1f} MiB ({one['share']:.3f} of fp32)  "
                f"peak {one['peak'] / MIB:6.1f} MiB, {one['peak'] / one['bytes']:.2f} of them, over "
                f"{one['imported'] / MIB:.0f} MiB of imports  probe {one['error']:.1e} nats  {one['seconds']:.1f} s"
            )


if __name__ == "__main__":
    main()
