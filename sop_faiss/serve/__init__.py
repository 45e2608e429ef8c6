"""The web page of an index: search by image in a browser, and the same as JSON."""
