"""Hold the encoding engines, one file an engine, behind one protocol."""
