"""Makers of what the package embeds: the models of the `tiny` pools and the recorded texts `tiny:book`."""
