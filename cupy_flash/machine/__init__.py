"""What executes a plan: a GPU, this machine's processor in its place, or NumPy."""
