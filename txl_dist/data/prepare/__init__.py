"""Preparation of corpora: `txl prepare` turns text into shards of tokens."""
