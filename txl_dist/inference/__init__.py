"""Inference with a trained model: scoring and generation. It imports the model and tokenizers, but no training code."""
