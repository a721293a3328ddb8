"""Race engines on the user's own texts: who takes part, for how long, and which one wins."""
