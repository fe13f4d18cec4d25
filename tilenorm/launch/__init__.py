"""How a kernel is launched: configurations, plans, and the one call of ct.launch."""
