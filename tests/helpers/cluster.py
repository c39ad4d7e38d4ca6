"""Nodes of tools/checks/local_cluster.sh: whether this machine can simulate them, and what runs on them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLUSTER = str(ROOT / "tools/checks/local_cluster.sh")


def why_not() -> str:
    """Why there can be no simulated cluster here; empty if there can."""
    missing = [name for name in ("ip", "unshare", "nsenter", "pdsh", "/usr/sbin/sshd") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (apt-get install iproute2 util-linux openssh-server pdsh)"
    if os.geteuid() != 0:
        return "needs root"
    attempt = "ip link add name one type bridge && ip link add name two type veth peer name three"
    parts = ["--net", "--uts", "--mount", "--pid", "--fork"]
    made = subprocess.run(["unshare", *parts, "sh", "-c", attempt], capture_output=True, text=True, check=False)
    return "" if made.returncode == 0 else f"cannot make network namespaces: {made.stderr.strip()}"


def processes(cluster: Path, node: str) -> dict[int, list[str]]:
    """The command lines of what runs on a node, but for its sshd."""
    here = os.readlink(f"/proc/{(cluster / f'{node}.pid').read_text().strip()}/ns/pid")
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            if os.readlink(folder / "ns/pid") == here and words[0] and not words[0].startswith("sshd"):
                found[int(folder.name)] = words
        except OSError:
            continue  # it has ended meanwhile
    return found


def losses(run: Path) -> dict[int, float]:
    """The last loss recorded for each step."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}
