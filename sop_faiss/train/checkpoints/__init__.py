"""Checkpoints of a run: write them whole, and continue from them."""
