"""Saved states that any kill, or a full disk, leaves whole."""
