"""Text to shards."""
