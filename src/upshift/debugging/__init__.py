"""What is wrong with this machine, this run, this loss. Files that look into models need torch: import them by name."""
