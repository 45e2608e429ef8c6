"""FAISS under an index on disk: make, train, write, open and search it."""
