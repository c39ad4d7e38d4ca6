"""Training of a model on a prepared corpus. Only the subpackage `engine` imports DeepSpeed."""
