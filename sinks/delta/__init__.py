"""The warehouse: Delta tables, for each captured table a log of changes and a mirror of its rows."""
