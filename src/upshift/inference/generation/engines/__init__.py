"""Hold the generation engines, one file an engine, behind one protocol."""
