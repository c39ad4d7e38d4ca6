"""The model on DeepSpeed: the only room that imports it."""
