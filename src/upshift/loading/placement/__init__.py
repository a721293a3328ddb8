"""Decide which part of a model goes to which device, what that costs, and place it."""
