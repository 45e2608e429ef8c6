"""Verbs that join the parts: training with online evaluation, retrieval with a page, the demo, the doctor."""
