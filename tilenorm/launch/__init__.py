"""How kernels are launched: configurations, plans, and the only calls to ct.launch."""
