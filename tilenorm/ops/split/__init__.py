"""Norms of rows in pieces: a process holds some columns of each row; sums are all-reduced."""
