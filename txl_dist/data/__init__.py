"""Data of a run: preparing, storing, verifying and reading corpora. This package does not depend on the model."""
