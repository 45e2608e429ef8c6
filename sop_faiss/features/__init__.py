"""Images to frozen features on disk."""
