"""Checkpoints of a run: writing, reading, checking and pruning."""
