"""Start of runs through the `deepspeed` launcher, and of sweeps over settings."""
