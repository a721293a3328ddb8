"""Read data from a path, and turn it into tokenized sequences."""
