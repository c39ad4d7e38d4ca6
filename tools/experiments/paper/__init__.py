"""The tables of the paper, made again at a size that two cores can train."""
