"""Describe a model for planning: its source on disk, its traced profile, its chunked loss head."""
