"""Checkpoints: written, read, checked, pruned."""
