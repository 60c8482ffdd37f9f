"""One batch: how large it is, how it is written, and what of the quarantine is tried again before it."""
