"""Vectors and class scores from texts."""
