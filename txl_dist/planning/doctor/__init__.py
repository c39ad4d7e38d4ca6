"""Checks of a machine, or of all nodes of a job, before training: `txl doctor`."""
