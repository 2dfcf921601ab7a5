"""Reference implementations written from the formulas; they do not import the package that they check."""
