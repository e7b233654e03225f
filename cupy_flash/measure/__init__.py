"""How fast, how much memory traffic, and against whom."""
