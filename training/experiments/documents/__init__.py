"""Writes the tables of README files, and model cards, from committed measurements."""
