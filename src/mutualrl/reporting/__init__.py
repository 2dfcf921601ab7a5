"""What people look at: a run's page, figures, model cards. Reads a run's files alone, whatever state they are in."""
