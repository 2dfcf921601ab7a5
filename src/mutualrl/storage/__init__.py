"""Files on disk: run directories, checkpoints, and the one way to write a file safely."""
