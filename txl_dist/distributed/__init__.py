"""Processes and ranks: rendezvous, collectives, the environment of a rank."""
