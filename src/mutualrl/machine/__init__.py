"""Devices and software of this machine, and the requirements of a recipe."""
