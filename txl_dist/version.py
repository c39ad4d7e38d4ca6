"""Version of the package. `txl --version` prints it, and checkpoints record it."""

__version__ = "0.3.0"
