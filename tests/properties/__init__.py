"""Drawn batches against the float64 oracle: shapes, layouts, flags, and rows of every kind."""
