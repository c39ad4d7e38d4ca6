"""Programs that train models for the figures in the documentation, and the records of their results."""
