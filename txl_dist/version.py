"""Version of the package, as `txl --version` prints it and checkpoints record it."""

__version__ = "0.3.0"
