"""Programs that measure time and memory, most of them beside other code, and what they share."""
