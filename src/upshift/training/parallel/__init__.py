"""Ranks that share a model: where each stands, what it has of the model, and what the ranks do together."""
