"""Postgres changes, applied in order to a search index, a cache and a warehouse."""
