"""Diagnostics of the paper, one module each: a file here is a command `mutualrl paper NAME`."""
