"""Metrics and protocols: k-NN, retrieval."""
