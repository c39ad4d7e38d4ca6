"""What a training needs: `run.plugins = ["txl_example.training"]`."""

from txl_example import metric, optimizer, positions, tokenizer

__all__ = ["metric", "optimizer", "positions", "tokenizer"]
