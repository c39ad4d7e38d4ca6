"""Is a corpus whole, and what is in it."""
