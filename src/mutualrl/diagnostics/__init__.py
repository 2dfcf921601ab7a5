"""Diagnostics of a pool, before and after training. One package or module for each command."""
