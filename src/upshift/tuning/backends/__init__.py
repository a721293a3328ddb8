"""One file a search library: how it is told a space."""
