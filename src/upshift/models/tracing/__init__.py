"""Trace a model on fake tensors: memory, FLOPs and traffic of each layer as polynomials."""
