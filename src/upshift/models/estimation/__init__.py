"""Estimate a decoder's profile from the sizes in its config, without torch and without a trace."""
