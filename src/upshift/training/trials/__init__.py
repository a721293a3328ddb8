"""Try plans before a run: short trainings on the run's own data, each in a separate process."""
