"""Features to a searchable index on disk."""
