"""Read and write checkpoint files: safetensors, sharded folders, and pickled weights through a process of its own."""
