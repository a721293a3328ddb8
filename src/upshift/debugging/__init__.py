"""What is wrong with this machine, this run, this loss. Light; files that look into models or measure need torch: import by name."""
