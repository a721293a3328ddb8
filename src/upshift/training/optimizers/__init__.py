"""The plan's optimizer: built, combined, rounded, run in the backward pass or on the host."""
