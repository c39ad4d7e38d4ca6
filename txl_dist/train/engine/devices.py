"""How many devices DeepSpeed sees on this machine, which is how many ranks its launcher can start here."""

from __future__ import annotations


def count_devices() -> int:
    """Return the GPUs of this machine; without any, the NUMA nodes of its CPUs."""
    from deepspeed.accelerator import get_accelerator

    return int(get_accelerator().device_count())
