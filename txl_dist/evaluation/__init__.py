"""Evaluation of trained models on a validation split: `txl evaluate` and `txl recl`."""
