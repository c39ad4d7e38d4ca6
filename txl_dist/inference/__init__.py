"""Inference with a trained model: scoring and generation. This package imports the model and the tokenizers, but no
training code."""
