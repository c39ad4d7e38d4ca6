"""The allocator of a rank, in separate processes: freed memory is returned, unless the user configures the
allocator."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from txl_dist.distributed.malloc import _has_huge_pages

PROGRAM = """
from txl_dist.distributed.malloc import give_memory_back
print(give_memory_back())
import torch
def anonymous_mib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) / 1024
tensors = [torch.ones(4 << 18) for _ in range(40)]  # 4 MiB each
torch.ones(5 << 20)  # freed: from now on glibc would serve such blocks from its heap
before = anonymous_mib()
mixed = [torch.ones(4 << 18) for _ in range(40)]
del mixed[::2]
print(anonymous_mib() - before)
"""


def run(program: str, **environment: str) -> list[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "THP_", "GLIBC_"))}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.skipif(not _has_huge_pages(), reason="without huge pages the allocator is left as it is")
@pytest.mark.slow
def test_freed_blocks_between_others_go_back_to_the_system() -> None:
    done, growth = run(PROGRAM)
    assert done == "True"
    assert 78 < float(growth) < 90  # 20 of 40 are left
    _, growth_else = run(PROGRAM.replace("give_memory_back())", "None)"))
    assert float(growth_else) > 120


def test_what_the_user_has_set_up_is_left_alone() -> None:
    program = PROGRAM.partition("import torch")[0]
    assert run(program, MALLOC_TRIM_THRESHOLD_="1000000") == ["False"]
    assert run(program, GLIBC_TUNABLES="glibc.malloc.check=0") == ["False"]


def test_it_is_left_alone_once_torch_is_there() -> None:
    assert run("import torch, txl_dist.distributed.malloc as a; print(a.give_memory_back())") == ["False"]
