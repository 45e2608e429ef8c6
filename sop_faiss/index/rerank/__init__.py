"""Put the first images that a search found into a better order."""
