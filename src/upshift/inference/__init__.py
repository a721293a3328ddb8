"""Runs models forward: encoding and generation, by the engine that a race on the user's own texts has found."""
