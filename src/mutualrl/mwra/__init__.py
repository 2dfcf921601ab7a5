"""Multi-Worker Resource Allocation (MWRA): devices, placement, launch and supervision of process groups."""
