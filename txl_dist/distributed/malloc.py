"""Set-up of glibc's memory allocator before torch is imported. This reduces the host memory of a CPU rank by a third.

After a block of up to 32 MiB was freed, glibc takes further blocks of this size from the heap. Then weights, gradients
and buckets of all sizes are mixed in the heap, and freed memory stays with the process. The resident set of a CPU rank
was 20 to 45 % larger than its live memory. With a fixed threshold, large blocks are mapped by the system and returned
when they are freed. New pages of 4 KiB would make a step an eighth slower, but huge pages have no measurable cost. So
the threshold is set only if torch may use huge pages.

    blocks >= 2 MiB    mapped separately, on huge pages, returned when freed
    smaller blocks     from the heap, which keeps its size (train/footprint assumes this)

GPU memory has its own allocator and is not affected. A C library other than glibc is left unchanged.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

MAPPED_BYTES = 1 << 21
"""Blocks of at least this many bytes are mapped separately. The value is the size of a huge page."""
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_HEAP_KEPT_BYTES = 64 << 20
_BY_USER = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def give_memory_back() -> bool:
    """Make glibc return freed memory to the system, and let torch use huge pages. Call it before torch is imported.

    Returns whether the settings were made. Nothing is changed if the user has configured the allocator, if the system
    has no huge pages, if torch is already imported, or if the C library has no such setting.
    """
    is_torch_imported = "torch" in sys.modules
    is_set_by_user = any(os.environ.get(name) for name in _BY_USER)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if is_torch_imported or is_set_by_user or mallopt is None or not _has_huge_pages():
        return False
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # makes torch ask for huge pages
    if not mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _HEAP_KEPT_BYTES))


def _has_huge_pages() -> bool:
    """Return whether a program may ask this system for transparent huge pages."""
    try:
        return "[never]" not in _HUGE_PAGES.read_text(encoding="ascii")
    except OSError:
        return False
