"""Computations called with arrays: from arguments to launch, one file a computation."""
