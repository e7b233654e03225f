"""The command line of a checkout, installed or not: ``python cli.py check``."""

import sys

from cupy_flash.cli import main

if __name__ == "__main__":
    main(prog_name=f"python {sys.argv[0]}")
