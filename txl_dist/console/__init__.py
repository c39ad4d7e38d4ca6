"""Output for the terminal and the log: text for people, sizes and tables, progress, and suggestions for misspelt
names."""
