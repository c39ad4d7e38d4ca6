"""A trained model on held-out text: `txl evaluate` and `txl recl`."""
