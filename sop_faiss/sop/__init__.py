"""The SOP method: memory, prototypes, losses."""
