"""Execute a Plan: one loop for one CPU, one GPU and several processes."""
