"""Pictures of the documentation, as SVG. `python docs/make.py` writes them."""
