"""Data sets as they lie on disk: layouts, ground truth and labels, read and checked before anything is measured."""
