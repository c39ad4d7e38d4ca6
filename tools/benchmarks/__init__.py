"""Programs that measure time and memory, most of them in comparison with other code, and the modules they share."""
