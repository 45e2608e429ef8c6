"""The packaged studies; `sop-study NAME` finds them by name."""
