"""Predictions of a run's memory, speed and cost before it starts."""
