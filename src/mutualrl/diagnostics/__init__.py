"""Diagnostics of a pool, before and after training. One module or package per command."""
