"""Backend 'numpy': attention in array code, tile by tile, one file a computation."""
