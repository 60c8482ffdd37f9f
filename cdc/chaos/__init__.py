"""Faults on purpose in a pipeline on a staging system, and what has to hold after each."""
