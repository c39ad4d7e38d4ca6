"""Monitoring of a run: hanging and lost ranks, stop requests, stragglers, and the lock of the run directory."""
