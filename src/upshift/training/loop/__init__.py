"""Run the training loop, and report its events."""
