"""The commands: parse, call one library verb, print."""
