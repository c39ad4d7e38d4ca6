"""Is a machine, or a job of them, fit to train."""
