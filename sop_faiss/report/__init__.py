"""Images and pages of results."""
