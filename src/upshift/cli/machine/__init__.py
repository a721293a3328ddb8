"""Commands for the machine itself: what is installed on it."""
