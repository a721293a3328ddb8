"""Read images and sounds: their files, their headers, and sounds at the rate that a model takes."""
