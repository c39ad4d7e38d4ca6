"""What a preparation needs: `txl prepare --plugins txl_example.text`."""

from txl_example import source, tokenizer

__all__ = ["source", "tokenizer"]
