"""Access to the files of corpora: in folders, at URLs, and in a cache on disk."""
