"""Run whole copies of a model, each in a process of its own: one that is killed is started again and healed by the others."""
