"""Data sets that are described: several files with their slices, names of columns, and templates of prompts."""
