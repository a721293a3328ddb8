"""The one training loop and what it says on the way."""
