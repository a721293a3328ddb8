"""Let ranks share a model: their places, their parts of the model, and their common operations."""
