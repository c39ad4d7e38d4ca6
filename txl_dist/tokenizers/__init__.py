"""Text to ids and back, and the cluster partition of given ids. Runs on the host: numpy, no torch."""
