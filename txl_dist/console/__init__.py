"""The terminal and the log: text for people, sizes and tables, progress, near names."""
