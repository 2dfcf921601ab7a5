"""Devices and software of this machine, and what a recipe needs of it."""
