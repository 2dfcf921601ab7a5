"""Reference implementations written from the formulas alone: they import nothing of the package that they check."""
