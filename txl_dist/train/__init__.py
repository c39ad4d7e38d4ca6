"""Training: what happens between a corpus and a committed checkpoint. DeepSpeed lives in `engine` and `checkpoint`."""
