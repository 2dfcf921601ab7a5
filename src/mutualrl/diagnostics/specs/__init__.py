"""Diagnostics of rollouts, one module each: a file here is a command."""
