"""Documents made of whole topics at once, to check those that were kept current change by change."""
