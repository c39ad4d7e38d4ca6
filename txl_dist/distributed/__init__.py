"""Processes and ranks: rendezvous, collectives, and the environment variables of a rank."""
