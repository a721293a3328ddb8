"""Let ranks share a model: the mesh of ranks, each rank's part of the model, and the collectives between them."""
