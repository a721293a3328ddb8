"""Predict the cost of a plan: allocated memory, held memory and time."""
