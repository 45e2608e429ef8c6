"""The page of a run: facts, curves, prototypes and neighbors."""
