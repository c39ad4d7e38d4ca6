"""Predictions of the cost of a run, before it starts."""
