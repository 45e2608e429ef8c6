"""Score an encoder: k-NN, linear probe, retrieval."""
