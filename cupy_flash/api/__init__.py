"""The public functions, one file a computation. No logic: each hands its arguments on."""
