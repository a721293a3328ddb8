"""Choose a plan for a host, a model and a workload: the space, its costs, the ranking, the trials, the reasons."""
