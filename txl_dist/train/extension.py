"""DeepSpeed compiles its CPU collectives at the first start, in silence and behind a lock file of torch: say so.

A process that is killed while it compiles leaves the lock, for which every later start would wait forever. Whoever
compiles keeps the file open; one that no process here has open, and that is older than any compilation takes, is dead.
(Age matters because another machine may share the folder.)
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root

from txl_dist.log import logger

NAME = "deepspeed_shm_comm"
LONGEST_S = 600.0


def prepare_compilation() -> None:
    """Remove a dead lock, and say what the coming silence is. Call it before `deepspeed.initialize` on a CPU."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in root.rglob(f"{NAME}/lock"):
        if is_dead(lock):
            logger.warning("removed %s, which a killed compilation left", lock)
            lock.unlink(missing_ok=True)
        else:
            logger.warning("waiting for another process to compile; if there is none, remove %s", lock)
    if not any(root.rglob(f"{NAME}/*.so")):
        logger.info("DeepSpeed compiles its CPU collectives, once: about a minute")


def is_dead(lock: Path) -> bool:
    """Whether nobody can be compiling behind it any more."""
    try:
        is_old = time.time() - lock.stat().st_mtime > LONGEST_S
    except OSError:  # gone meanwhile
        return False
    return is_old and not any(_is_at(link, lock) for link in Path("/proc").glob("[0-9]*/fd/*"))


def _is_at(link: Path, lock: Path) -> bool:
    try:
        return link.samefile(lock)
    except OSError:  # a process of somebody else, or one that has ended
        return False
