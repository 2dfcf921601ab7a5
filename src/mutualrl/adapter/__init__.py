"""TRL's trainer with public hooks: for training, and for runs of agents outside of it."""
