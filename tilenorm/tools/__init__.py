"""Tools that no call of an op needs: precompile, tune, explain and info."""
