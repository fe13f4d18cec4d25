"""Device code: cuTile kernels and the tile functions they share."""
