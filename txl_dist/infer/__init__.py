"""Inference: scoring and generation from a bundle. Imports the model and the text code, never training or data."""

from txl_dist.infer.bundle import Bundle, load

__all__ = ["Bundle", "load"]
