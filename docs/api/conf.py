"""How `make docs` builds the reference. Warnings are errors: docstrings that do not parse, references to nothing."""

import paged_ops

project = "paged_ops"
version = release = paged_ops.__version__
copyright = "the paged_ops contributors, Apache-2.0"

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
default_role = "code"
nitpicky = True
# Names of other projects, and types in signatures that are not public.
nitpick_ignore_regex = [("py:.*", r"(?!paged_ops).*"), ("py:class", r"paged_ops\..*")]

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

html_theme = "alabaster"
html_theme_options = {"description": "Paged attention for PyTorch", "page_width": "1100px", "sidebar_width": "230px"}
html_show_copyright = False
