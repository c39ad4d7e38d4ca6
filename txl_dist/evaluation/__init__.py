"""Evaluation of trained models on held-out text: `txl evaluate` and `txl recl`."""
