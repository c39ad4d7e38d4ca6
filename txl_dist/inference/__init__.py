"""Inference: a trained model, scoring, generation. Imports the model and the text code, never training or data."""
