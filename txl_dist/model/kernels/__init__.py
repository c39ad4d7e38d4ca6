"""Fused GPU kernels, one file each. `txl_dist/model` has the same computations in plain torch.

Importing this package does not import triton.
"""
