"""Write a plan as the configuration of another program, and read the plan's choices from such a configuration."""
