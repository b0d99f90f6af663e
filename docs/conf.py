"""Sphinx configuration; `make docs` builds the site. Figures are drawn first, by figures.py,
gallery.py and plots.py.
"""

import os
import re
import sys
from pathlib import Path

# The support matrix runs Triton's kernels in the interpreter, which is decided at the first import.
os.environ["TRITON_INTERPRET"] = "1"

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # figures.py, gallery.py and others, which draw_and_list imports

from docutils import nodes  # noqa: E402
from sphinx.pycode import ModuleAnalyzer  # noqa: E402

import graphattn  # noqa: E402

project = "graphattn"
author = "The graphattn developers"
version = release = graphattn.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx-mathjax-offline",  # the pages need no network
    "sphinx_copybutton",
    "myst_nb",  # includes myst_parser
]
exclude_patterns = ["_build", "_figures"]
myst_enable_extensions = ["amsmath", "deflist", "dollarmath", "html_image"]
myst_heading_anchors = 3

# Notebooks have no outputs in git. They always run: a cache would not notice a changed library.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 600  # seconds for a cell; a busy machine takes ten times as long
nb_execution_in_temp = True
nb_merge_streams = True

html_theme = "furo"
html_title = f"graphattn {version}"
html_static_path = ["_static"]
html_css_files = ["graphattn.css"]
html_copy_source = False
html_show_copyright = False

# A copied example has neither prompts nor output.
copybutton_prompt_text = r">>> |\.\.\. |\.\.\.$"
copybutton_prompt_is_regexp = True

# For maintainers: these pages are in the last part of the contents, and no search finds them.
MAINTAINERS = "log", "changelog", "benchmarks/records", "benchmarks/kernels", "benchmarks/emulated"

# Docstrings write arguments and short code in single backticks.
default_role = "code"
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Shapes"]
napoleon_use_rtype = False
napoleon_use_ivar = True
autodoc_default_options = {"member-order": "bysource"}
autodoc_inherit_docstrings = False
autodoc_class_signature = "mixed"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 90

_SHAPE = re.compile(r"(?<![\w`\])\[])\[(?:[\w*/ +]+|\.\.\.)(?:, [\w*/ +]+)*\](?![`(])")


def shapes_as_code(app, what, name, obj, options, lines) -> None:
    """`[*, N, dim]` in a docstring is set as code, where RST would take the star for emphasis."""
    example = False
    for number, line in enumerate(lines):
        example = line.lstrip().startswith(">>>") or (example and bool(line.strip()))
        if example:
            continue
        pieces = re.split(r"(``.*?``|`[^`]*`)", line)
        pieces[::2] = [_SHAPE.sub(r"``\g<0>``", piece) for piece in pieces[::2]]
        lines[number] = "".join(pieces)


def end_of_code(app, doctree) -> None:
    """Doctest needs a blank line before the closing fence; readers do not."""
    for node in doctree.findall(nodes.literal_block):
        node.rawsource = node.astext().rstrip()
        node.children = [nodes.Text(node.rawsource)]


def one_signature_per_function(app) -> None:
    """Forget overloads: they repeat a whole signature for each value of a flag."""
    for name in graphattn.__all__:
        getattr(graphattn, name)  # loads what loads on first use
    for name, module in list(sys.modules.items()):
        if not name.startswith("graphattn.") or not hasattr(module, "overload"):
            continue
        analyzer = ModuleAnalyzer.for_module(name)
        analyzer.analyze()
        analyzer.overloads.clear()


def leave_out_of_search(app, env) -> None:
    """Mark pages for maintainers as Sphinx's `:nosearch:` does, which generated files lack."""
    for page in MAINTAINERS:
        env.metadata[page]["nosearch"] = "true"


def draw_and_list(app) -> None:
    """Draw the figures, and write the tables that no one should write by hand."""
    import families
    import figures
    import gallery
    import plots
    import pretrained
    import records
    import support

    folder = HERE / "_figures"
    figures.draw_all(folder)
    gallery.draw_all(folder)
    plots.draw_all(folder)
    tables = {
        "benchmarks": records.markdown,
        "plots": plots.markdown,
        "pretrained": pretrained.markdown,
        # What runs where: by graph from `graphattn.backends`; the rest by trying it.
        "support": lambda: support.by_graph() + "\n" + support.by_feature(),
        "families": families.table,
    }
    for name, table in tables.items():
        (folder / f"{name}.md").write_text(table(), encoding="utf-8")


def setup(app) -> None:
    app.connect("builder-inited", one_signature_per_function)
    app.connect("builder-inited", draw_and_list)
    app.connect("autodoc-process-docstring", shapes_as_code, priority=400)  # before napoleon
    app.connect("doctree-read", end_of_code)
    app.connect("env-updated", leave_out_of_search)
