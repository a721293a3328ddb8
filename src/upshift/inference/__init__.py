"""Runs models forward: encoding, by the engine that a race on the user's own texts has found."""
