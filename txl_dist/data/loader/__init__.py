"""Loader of prepared corpora: contiguous lanes of tokens for training, and segments for evaluation."""
