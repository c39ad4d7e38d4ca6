"""Verification and inspection of corpora: `txl verify` and `txl inspect`."""
