"""Verbs that operate a pipeline: run it, pause a sink, remove it, and say who did what."""
