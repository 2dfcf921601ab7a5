"""Reports: a run's HTML page, figures, model cards. Reads a run's files alone, whatever state they are in."""
