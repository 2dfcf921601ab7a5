"""Files on disk: run directories, checkpoints, atomic writes."""
