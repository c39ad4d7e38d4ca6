"""The engine, which trains the model with DeepSpeed. Only this package imports DeepSpeed."""
