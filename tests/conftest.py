"""For all tests: no GPU where none is asked for, nothing of one test left to the next."""

import os
from collections.abc import Iterator

import pytest
import torch

# The first fp64 exponential that several threads share is now and then of low accuracy (3e-9 instead of 1e-16, in 3 of
# 120 processes; torch 2.13 with MKL): the threads race to set the library up. One that is too small to share does it.
torch.ones(8, dtype=torch.float64).exp()

os.environ["DS_ACCELERATOR"] = "cpu"


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """The environment and the process group are after each test what they were before it: a job of one rank in this
    process leaves both (a port, a rank), and the next test would meet them in whatever order the tests run."""
    before = dict(os.environ)
    if request.node.get_closest_marker("gpu"):
        del os.environ["DS_ACCELERATOR"]
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
