"""List GPUs, CPUs, TPUs and the links between them, with the source of each figure."""
