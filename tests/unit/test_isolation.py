"""The state that a test leaves in its process does not reach the next test, and tests see no GPU."""

import os
import subprocess
import sys

import pytest
import torch

from tests.helpers.forked import REPOSITORY
from txl_dist.distributed.collectives import uses_gpu


@pytest.mark.parametrize("_time", ["first", "second"])
def test_what_one_test_leaves_the_next_does_not_meet(_time: str) -> None:
    assert "LEFT_BEHIND" not in os.environ
    assert not torch.distributed.is_initialized()
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(1)))
    os.environ["LEFT_BEHIND"] = "1"
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def test_no_gpu_is_used_where_none_is_asked_for() -> None:
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    assert not uses_gpu()


def test_forked_processes_find_the_packages_that_this_process_finds_by_its_path() -> None:
    program = "from tests.helpers import forked; print(forked.environment()['PYTHONPATH'])"
    variables = os.environ | {"PYTHONPATH": f"/site{os.pathsep}{REPOSITORY}"}
    told = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    assert told.stdout.split() == [os.pathsep.join([str(REPOSITORY), "/site", str(REPOSITORY)])]
