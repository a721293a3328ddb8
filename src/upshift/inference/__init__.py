"""Run models forward: encoding and generation, by the engine that won a race on the user's own texts."""
