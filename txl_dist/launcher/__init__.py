"""Starts runs: the `deepspeed` launcher, its files and output, sweeps over settings."""
