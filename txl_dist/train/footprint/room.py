"""Memory that a run can use: all memory of a GPU, or the host memory that a machine and its control groups leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

GROUPS = Path("/sys/fs/cgroup")
"""Folder in which Linux shows its control groups, which limit the memory of processes."""
OF_PROCESS = Path("/proc/self/cgroup")
"""File in which Linux lists the control groups of this process."""


def room_bytes(device: torch.device) -> float:
    """Return the bytes of memory available to a run: all memory of a GPU, or on a CPU the host memory that is left."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return host_room_bytes()


def host_room_bytes() -> float:
    """Return the bytes that processes can still allocate: memory and swap, limited by control groups."""
    room = float(psutil.virtual_memory().available + psutil.swap_memory().free)
    for group, is_v2 in control_groups("memory"):
        room = min(room, _left_bytes(group, is_v2=is_v2))
    return room


def control_groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield (folder, is_v2) for each control group of this process and each parent group.

    `controller` is the resource that the groups control, for instance memory. `is_v2` says whether the group is of
    version 2 of the Linux interface.
    """
    try:
        lines = OF_PROCESS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, place = line.split(":", maxsplit=2)
        if not controllers or controller in controllers.split(","):
            if controllers:
                root = GROUPS / controller
            else:
                root = GROUPS
            folder = root / place.lstrip("/")
            for parent in (folder, *folder.parents):
                if parent.is_relative_to(root):
                    yield parent, not controllers


def _left_bytes(group: Path, *, is_v2: bool) -> float:
    """Return the bytes that a control group leaves. The result is infinite if the group has no limit.

    Cached files count as free, because the system drops them if memory is needed.
    """
    if is_v2:
        names = ("memory.max", "memory.current")
    else:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    if is_v2:
        prefix = ""
    else:
        prefix = "total_"
    try:
        limit, used = ((group / name).read_text(encoding="ascii").strip() for name in names)
        stat_lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
        stat = dict(line.split() for line in stat_lines)
        cached = int(stat.get(f"{prefix}active_file", 0)) + int(stat.get(f"{prefix}inactive_file", 0))
        if limit.isdigit():
            return int(limit) - int(used) + cached
        return float("inf")
    except (OSError, ValueError):
        return float("inf")
