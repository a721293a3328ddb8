"""Lower torch.export's core ATen operators to TensorFlow operations. Each family of operators has a module."""
