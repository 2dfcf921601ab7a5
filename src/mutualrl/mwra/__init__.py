"""Multi-Worker Resource Allocation (MWRA): devices, memory and placement of the policies."""
