"""Faults on purpose: the whole pipeline under load, a seeded choice of faults, and checks that can fail."""
