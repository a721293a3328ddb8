"""Save and load the states of runs, so that any kill, or a full disk, leaves them whole."""
