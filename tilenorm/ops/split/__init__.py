"""Norms of rows in pieces: each process holds some columns of a row, and their sums are all-reduced."""
