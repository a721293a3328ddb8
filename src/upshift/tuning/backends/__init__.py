"""Translate a space for each search library, one file for each."""
