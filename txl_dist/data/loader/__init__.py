"""Loader of prepared corpora: a token stream for each row of the training batch (lane), and segments for evaluation."""
