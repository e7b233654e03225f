"""``python -m cupy_flash``: the command line, as installed."""

from .cli import main

if __name__ == "__main__":
    main(prog_name="python -m cupy_flash")
