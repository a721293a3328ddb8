"""Test on a small copy of a model whether packing, padding and batching change its results."""
