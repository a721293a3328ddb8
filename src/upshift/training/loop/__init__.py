"""Run the one training loop, and report its events on the way."""
