"""Reports: HTML pages, figures and model cards, from a run's files alone, in any state."""
