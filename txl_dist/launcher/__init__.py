"""Starts runs: through the `deepspeed` launcher, or as sweeps over settings."""
