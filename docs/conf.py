"""Sphinx: `make docs` builds the site into site/html, which can be opened without a network.

Its source folder is that of the repository, so that links between the README, pages and notebooks
are the same here and there.
"""

import os
from functools import partial

import jupyter_cache.executors.utils as executors

import credit_dp

project = "credit_dp"
author = "The credit_dp developers"
project_copyright = author
version = release = credit_dp.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "notebooks/*"]
exclude_patterns = [".*", "site", "outputs", "multirun", "build"]

# Pages are Markdown as GitHub shows it; links to headings as GitHub names them.
myst_heading_anchors = 4
myst_links_external_new_tab = False
# With NOTEBOOKS=force they are executed, which takes some minutes, and shown with their results.
nb_execution_mode = os.environ.get("NOTEBOOKS", "off")
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_render_image_options = {"alt": "Plot of the code above"}
# A command's output comes in parts of 100 characters, and each would be a block on the page.
# nbclient can join them, myst_nb has no setting for that, and its own begins a line at each.
executors.executenb = partial(executors.executenb, coalesce_streams=True)
suppress_warnings = ["misc.highlighting_failure"]  # cells in bash

default_role = "code"  # of `names` in docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"credit_dp {version}"
html_copy_source = False
html_show_sourcelink = False
html_static_path = ["_static"]
html_extra_path = ["_extra"]
html_css_files = ["style.css"]
html_theme_options = {"navigation_with_keys": True}
