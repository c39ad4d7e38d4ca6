"""Programs that measure the tables of the paper again, at a size that two cores can train."""
