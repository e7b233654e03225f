"""The documentation: Markdown by MyST, the API from its docstrings by numpydoc. `sphinx-build -W docs build/site` builds it."""

from importlib.metadata import version as version_of

project = "cupy_flash"
author = "the cupy_flash authors"
copyright = f"2026, {author}"
version = release = version_of("cupy-flash")

extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc", "sphinx.ext.autosummary"]
exclude_patterns = ["data", "drawing"]
default_role = "py:obj"  # names in docstrings become links where there is something to link to

smartquotes = False  # what is quoted is code

autodoc_typehints = "none"  # types are in the parameters' descriptions; and one signature, not one for each overload
autosummary_generate = False
numpydoc_show_class_members = False

myst_heading_anchors = 3

html_theme = "pydata_sphinx_theme"
html_title = "cupy_flash"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_sidebars = {"index": [], "install": [], "benchmarks": []}  # without pages below them
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navbar_end": ["theme-switcher"], "show_prev_next": False, "footer_end": []}
