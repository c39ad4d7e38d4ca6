"""For all tests: what must have happened in a process before numbers are compared."""

import torch

# The first fp64 exponential that several threads share is now and then of low accuracy (3e-9 instead of 1e-16, in 3 of
# 120 processes; torch 2.13 with MKL): the threads race to set the library up. One that is too small to share does it.
torch.ones(8, dtype=torch.float64).exp()
