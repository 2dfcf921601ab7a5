"""Processes of a run: their status, signals, parents and ports."""
