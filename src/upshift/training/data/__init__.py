"""From a path to tokenized sequences."""
