"""The packaged configurations; `sop-train NAME` finds them by name."""
