"""The warehouse: for each captured table a log of changes and a mirror of its rows, in Delta."""
