"""Studies: sweeps over regimes, settings and seeds, and the comparison of their results."""
