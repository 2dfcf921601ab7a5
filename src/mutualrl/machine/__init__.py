"""What this machine has, and what a recipe needs of it."""
