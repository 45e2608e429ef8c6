"""Images of any source: list them, read them, decode them."""
