"""Expressions over the columns of one row, in SQL: parsed into terms, evaluated here, and written
for Postgres. The parser runs where a pipeline file is read; executors have only the terms.
"""
