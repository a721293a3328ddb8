"""Compute the texts of a file by several copies of a model, each in a process with its own share of the devices."""
