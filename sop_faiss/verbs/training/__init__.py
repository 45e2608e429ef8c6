"""Train a run, and look at what it would train on."""
