"""Embed images, build an index, and search it."""
