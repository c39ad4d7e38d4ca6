"""Copies of a run's checkpoints and records in object storage (`checkpoint.mirror`)."""
