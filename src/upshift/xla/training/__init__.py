"""Train under XLA: one compiled step for each planned shape, on one device or several, saved and resumed exactly."""
