"""What planning knows of a model: its source on disk, its traced profile, its chunked loss head."""
