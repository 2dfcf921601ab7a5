"""Questions that a pool can be asked before and after training. One package or module for each command."""
