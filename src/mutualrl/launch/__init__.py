"""Start and supervise the policies of a run: on this machine, on a Ray cluster, or as one that joins a bucket."""
