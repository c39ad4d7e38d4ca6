"""What surrounds a run."""
