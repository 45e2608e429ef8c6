"""Webdataset shards: walk, index, read, write and fetch them."""
