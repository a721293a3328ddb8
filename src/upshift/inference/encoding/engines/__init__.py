"""One file an engine, behind one protocol."""
