"""Search hyper-parameters: one form of a space for every backend, and no trial that cannot give a result."""
