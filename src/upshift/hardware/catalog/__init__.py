"""List the products that can be described: GPUs, CPUs, TPUs and the links between them, with sources."""
