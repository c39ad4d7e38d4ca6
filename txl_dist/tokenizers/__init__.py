"""Tokenizers: text to ids and back. They run on the host, with numpy and without torch."""
