"""The web page of an index: search by picture in a browser, and the same as JSON."""
