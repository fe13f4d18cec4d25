"""Norms of rows in pieces: a process holds some columns of each row, and the sums are all-reduced."""
