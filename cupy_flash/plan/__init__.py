"""How a problem is computed: (problem, architecture) -> kernel, grids, workspace and parameters. Pure functions."""
