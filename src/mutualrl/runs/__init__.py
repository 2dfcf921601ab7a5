"""The only reader of a run: one typed record of its files, and one frame of its metrics."""
