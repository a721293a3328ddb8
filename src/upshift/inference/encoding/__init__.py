"""Compute vectors and class scores from texts."""
