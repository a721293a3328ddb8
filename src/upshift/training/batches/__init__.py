"""Decide which tokens each micro-batch holds, and how they are arranged in it."""
