"""From text to the segments of a training step: sources, shards, lanes, streams. Knows no model and no cutoffs."""
