"""Studies: many runs that differ in few settings, and what they show together."""
