"""A prepared corpus as contiguous lanes of tokens."""
