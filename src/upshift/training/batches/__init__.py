"""Decide which tokens each micro-batch holds, and how they lie in it."""
