"""Hangs, deaths, requests to stop, stragglers, one job per run."""
