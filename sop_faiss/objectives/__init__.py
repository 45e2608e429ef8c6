"""Objectives: what student and teacher learn from a part of a batch. `sop.py` is the paper's."""
