"""Verbs that operate a pipeline: stop a part of it, and let it go on."""
