"""How much memory there is for a run: all of a GPU, or what a machine and its control groups leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

GROUPS = Path("/sys/fs/cgroup")
OF_PROCESS = Path("/proc/self/cgroup")


def room_bytes(device: torch.device) -> float:
    """Of a GPU all that it has; on a CPU what is left."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return host_room_bytes()


def host_room_bytes() -> float:
    """What processes may still take on this machine: memory and swap, or what the control groups leave of them."""
    room = float(psutil.virtual_memory().available + psutil.swap_memory().free)
    return min([room, *(_left_bytes(group, is_v2=is_v2) for group, is_v2 in control_groups("memory"))])


def control_groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Folders of this process's control groups and of those above; True for those of the kernel's second version."""
    try:
        lines = OF_PROCESS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, place = line.split(":", maxsplit=2)
        if not controllers or controller in controllers.split(","):
            root = GROUPS / controller if controllers else GROUPS
            folder = root / place.lstrip("/")
            yield from ((one, not controllers) for one in (folder, *folder.parents) if one.is_relative_to(root))


def _left_bytes(group: Path, *, is_v2: bool) -> float:
    """What a control group leaves, its cached files counted as free; infinite where it sets no limit."""
    names = ("memory.max", "memory.current") if is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    try:
        limit, used = ((group / name).read_text(encoding="ascii").strip() for name in names)
        facts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        prefix = "" if is_v2 else "total_"
        cached = sum(int(facts.get(f"{prefix}{name}", 0)) for name in ("active_file", "inactive_file"))
        return int(limit) - int(used) + cached if limit.isdigit() else float("inf")
    except (OSError, ValueError):
        return float("inf")
