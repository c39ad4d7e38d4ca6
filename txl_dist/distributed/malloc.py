"""Tell the C library, once and before torch is imported, to give memory back: on a CPU a rank is a third smaller.

glibc serves blocks from its heap as soon as a block of that size was freed, up to 32 MiB. Weights, gradients and
buckets of all sizes then lie between one another, and what is freed stays with the process: the resident set of a rank
on a CPU grew by 20 to 45 % over what is alive. With a threshold that stays put, large blocks come from the system and
go back to it. Fresh pages of 4 KiB would cost a step an eighth; huge ones cost nothing that can be measured. So this is
only done where torch may ask for huge pages.

    blocks >= 2 MiB    mapped apart, on huge pages, returned when freed
    smaller blocks     from the heap, which keeps what it once had (`footprint` counts them so)

It gives up nothing on a GPU, whose memory has an allocator of its own. Another C library than glibc is left alone.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

MAPPED_BYTES = 1 << 21
"""Blocks as large as a huge page are mapped apart."""
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_HEAP_KEPT_BYTES = 64 << 20
_BY_USER = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def give_memory_back() -> bool:
    """Set the threshold, and let torch ask for huge pages; call it before torch is imported.

    Returns whether it was done: not where the user has set the allocator up, the system has no huge pages to ask for,
    torch is there already, or the C library knows no such setting.
    """
    is_free = "torch" not in sys.modules and not any(os.environ.get(name) for name in _BY_USER)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if not is_free or mallopt is None or not _has_huge_pages():
        return False
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch's own switch
    return bool(mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES) and mallopt(_M_TRIM_THRESHOLD, _HEAP_KEPT_BYTES))


def _has_huge_pages() -> bool:
    try:
        return "[never]" not in _HUGE_PAGES.read_text(encoding="ascii")
    except OSError:
        return False
