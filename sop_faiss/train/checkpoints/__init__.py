"""Checkpoints of a run: write them completely, and continue from them."""
