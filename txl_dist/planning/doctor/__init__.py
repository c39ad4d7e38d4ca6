"""Checks of a machine, or of all nodes of a job, before training. The command is `txl doctor`."""
