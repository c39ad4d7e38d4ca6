"""The memory that a rank needs, foreseen."""
