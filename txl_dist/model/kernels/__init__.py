"""Fused GPU kernels, one file each, with plain twins in `model/`. Importing this package does not import triton."""
