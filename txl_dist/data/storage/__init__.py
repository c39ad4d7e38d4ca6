"""Where bytes of shards lie: folders, remote places, the cache on disk."""
