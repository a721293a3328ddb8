"""Train models whose labels lie within images: boxes of objects, and label images."""
