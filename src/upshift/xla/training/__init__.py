"""Train under XLA, with one compiled step for each planned shape, on one device or several. Runs are resumed exactly."""
