"""The log of a Delta table: commits, the positions that they carry, and who else has committed."""
