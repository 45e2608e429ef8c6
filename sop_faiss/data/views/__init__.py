"""Views of an image: crops, colors and masks."""
