"""Turn a path into tokenized sequences."""
