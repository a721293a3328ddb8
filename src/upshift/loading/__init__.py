"""Read, write, convert and place a model's weights, on disk and in memory, without a second copy."""
