"""Prediction of the memory that a rank needs, and of the size of a checkpoint."""
