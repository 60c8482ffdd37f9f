"""The mirror of a view, its current rows: merged, rewritten, looked up by id, scanned."""
