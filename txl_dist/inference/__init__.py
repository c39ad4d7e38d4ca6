"""Inference with a trained model: scoring and generation. Imports the model and tokenizers, never training or data."""
