"""Tell people of trouble: each incident once, and its end, whichever processes look."""
