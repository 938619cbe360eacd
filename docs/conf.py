"""Sphinx's configuration. ``make docs`` builds the site into build/docs; warnings are errors there.

The source directory is that of the repository: a relative link from a page to a file beside docs/ leads there in the
site as it does on a git host.
"""

import sys
from pathlib import Path

from sphinx.pycode import ModuleAnalyzer

import ampctx

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import report

# For apex_names.py.
sys.path.append(str(Path(__file__).parent))

project = "ampctx"
author = "the authors of ampctx"
release = version = ampctx.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "apex_names"]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "examples/README.md",
    "examples/data/README.md",
    "benchmarks/*.md",
    "ampctx-apex/README.md",
    "CHANGELOG.md",
]
exclude_patterns = ["build", ".*", "**/.*"]
highlight_language = "none"
# What a page links to as #heading, in the form that git hosts give headings, too.
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"ampctx {release}"
html_extra_path = ["_extra"]
html_static_path = ["_static"]
html_css_files = ["ampctx.css"]
html_copy_source = False
# Copies commands without their prompts, and leaves out what they print.
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
html_show_copyright = False

toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 100
napoleon_numpy_docstring = False
# An entry such as "eps, weight_decay: ..." stands for several parameters.
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_use_ivar = True

nitpicky = True
# Types of others, to whose pages there is nothing here that leads.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|collections|contextlib|typing)\..*"),
    ("py:class", "M|Opt|Options"),  # of the overloads of initialize, which the page explains
]
nitpick_ignore = [
    ("py:class", "typing_extensions.Unpack"),
    ("py:class", "ampctx.optimizers._base.CommonOptions"),  # the keywords that FusedOptimizer explains
    ("py:class", "ampctx.optimizers._base.SharedOptions"),
    ("py:class", "ampctx.weights.step.Step"),  # what amp gives a step of its own optimizers
    ("py:class", "ampctx.kernels.ops.ScaleUpdate"),  # amp passes it to the ops, users do not
    ("py:class", "ampctx.amp.named_state.Stateful"),  # what amp.Stateful() returns
    ("py:class", "MixedPrecisionPolicy"),  # torch's, imported late
]


def setup(app):
    """Puts the figures of benchmarks/results into the pages: docs/benchmarks.md is made anew, others have marks."""
    found = report.load()
    page = Path(app.srcdir) / "docs" / "benchmarks.md"
    if not page.exists() or page.read_text() != report.page(found):
        page.write_text(report.page(found))

    def fill(app, name, source):
        if report.MARK.search(source[0]):
            app.env.note_dependency(str(report.FIGURES))
            source[0] = report.filled(source[0], found)

    app.connect("source-read", fill)
    # Overloads stand in the source as functions of a session; the page shows the method of one.
    analyzer = ModuleAnalyzer.for_module("ampctx.amp.setup")
    analyzer.analyze()
    of_method = [one.replace(parameters=[*one.parameters.values()][1:]) for one in analyzer.overloads["initialize"]]
    analyzer.overloads["initialize"] = of_method
