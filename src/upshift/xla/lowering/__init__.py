"""Lower torch.export's core ATen to TensorFlow operations: one file for each family of operators, behind one
registry."""
