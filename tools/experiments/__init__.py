"""Programs that train for the figures in the documentation, and the records that they keep."""
