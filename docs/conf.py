"""Sphinx: `make docs` builds the site into site/html, which can be opened without a network.

Its source folder is that of the repository, so that links between the README, pages and notebooks
are the same here and there.
"""

from typing import TYPE_CHECKING

from docutils import nodes

import credit_dp

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "credit_dp"
author = "The credit_dp developers"
project_copyright = author
version = release = credit_dp.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
root_doc = "docs/index"
include_patterns = ["CHANGELOG.md", "CONTRIBUTING.md", "docs/**.md", "notebooks/*"]
exclude_patterns = [".*", "site", "outputs", "multirun", "build"]

# Pages are Markdown as GitHub shows it; links to headings as GitHub names them.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
nb_execution_mode = "off"  # `scripts/run_notebooks.py` stores the results that are shown
nb_render_image_options = {"alt": "Plot of the code above"}
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
html_js_files = ["keys.js"]
html_logo = html_favicon = "_static/logo.svg"
html_theme_options = {
    "navigation_with_keys": True,
    "source_repository": "https://github.com/credit-dp/credit_dp",
    "source_branch": "main",
    "source_directory": "",
}

# Pages below another in the menu. GitHub would show a toctree in these as code.
SUBPAGES = {
    "docs/your-era5": """data-tables data-grids data-regions regional data-wrf data-calendars
        data-members data-limits preparing""",
    "docs/your-own-model": "own-model-rules write-a-rule",
    "docs/models": "model-zoo physics",
    "docs/training": "loss optimizer ensembles diffusion metrics checkpoints sweeps",
    "docs/which-parallelism": "plan-and-verify",
    "docs/reference/python": "plugins evaluation physics",
}


def add_subpages(_: "Sphinx", page: str, source: list[str]) -> None:
    """Put the pages of `SUBPAGES` below a page in the menu."""
    if page in SUBPAGES:
        names = "\n".join(SUBPAGES[page].split())
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{names}\n```\n"


def name_rows(_: "Sphinx", document: nodes.document) -> None:
    """Give each row of the page of all keys the name of its key, so that a link leads there."""
    if document.settings.env.docname != "docs/keys":
        return
    named = set()
    for row in document.findall(nodes.row):
        key = row.next_node(nodes.literal)
        if key is not None and key.astext() not in named:
            name = key.astext()
            named.add(name)
            row["ids"].append(name)
            key.replace_self(nodes.reference("", "", key.deepcopy(), refid=name))


def setup(app: "Sphinx") -> None:
    """Register what this site adds to Sphinx."""
    app.connect("source-read", add_subpages)
    app.connect("doctree-read", name_rows)
