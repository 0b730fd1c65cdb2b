"""The style of all plots: colours, markers, and figures whose panels share one legend and a caption.

Matplotlib is imported only when a figure is drawn, and without pyplot, which would select a GUI backend.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mars_jax.utils.errors import MarsError
from mars_jax.verify import rules

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

# The colours of Okabe and Ito (2008), which colour-blind readers can also distinguish.
BLACK, GREY = "#222222", "#888888"
ORANGE, SKY, GREEN = "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
MARKERS = "osv<>p"
FORMATS = ("png", "svg", "pdf")
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # bundled with matplotlib, so figures look the same everywhere
    "font.size": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E8E8E8",
    "legend.frameon": False,
    "errorbar.capsize": 2,
    "savefig.dpi": 160,
    "svg.fonttype": "none",  # keep text as text
    "svg.hashsalt": "mars-jax",
    "text.parse_math": False,  # otherwise, a name with two dollar signs would become a formula
}
# Omit metadata that would change the bytes of an unchanged figure.
METADATA = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}


class Look(NamedTuple):
    """Colour and marker of a rule or of another decoding method."""

    colour: str
    marker: str = "o"

    @property
    def line(self) -> dict[str, Any]:
        """Keyword arguments for `Axes.plot` and `Axes.errorbar`."""
        return {"color": self.colour, "marker": self.marker}


OTHER = Look(PURPLE, "D")
"""Colour and marker of rules that users wrote."""
BASELINES = {
    "autoregressive": Look(GREY, "s"),
    "target": Look(GREY, "s"),
    "exact": Look(BLACK, "D"),
    "rejection": Look(BLACK, "P"),
    "block": Look(BLACK, "X"),
    "low-margin": Look(GREY, "X"),
    "transformers": Look(ORANGE, "h"),
}
_LOSSY = ["mars", *(name for name in rules() if name not in {*BASELINES, "mars"})]


def look(name: str) -> Look:
    """Return the colour and marker of a rule or an arm, chosen by the first word of its name.

    Variants of a rule share a colour, but have different markers.

    >>> look("mars theta=0.9") == look("mars"), look("mars(gap) theta=1")
    (True, Look(colour='#0072B2', marker='^'))
    >>> look("gates.py:entropy_gate") == OTHER
    True
    """
    first_word = re.split(r"[ (]", name)[0]
    if first_word in BASELINES:
        return BASELINES[first_word]
    if first_word not in _LOSSY:
        return OTHER
    # After the last colour, start again with the first one and the next marker.
    marker_index, colour_index = divmod(_LOSSY.index(first_word), len(COLOURS))
    marker = MARKERS[marker_index]
    if "(gap)" in name or " over " in name:
        marker = "^"
    return Look(COLOURS[colour_index], marker)


def check_installed() -> None:
    """Raise MarsError if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MarsError("plots need the package matplotlib: pip install matplotlib.") from None


@contextmanager
def picture(
    files: Sequence[Path],
    *,
    rows: int = 1,
    columns: int = 1,
    panel: tuple[float, float] = (4.2, 3.0),
    caption: str = "",
    **grid: Any,
) -> Iterator[np.ndarray]:
    """Yield axes [rows, columns] to draw on. When the block ends, add a legend above the panels and write the files.

    Args:
      files: files to write, in the formats of their suffixes.
      rows, columns: size of the grid of panels. Panels without data are hidden.
      panel: width and height of a panel in inches.
      caption: text below the panels.
      **grid: arguments of `Figure.subplots`, such as `sharey=True`.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        width = columns * panel[0]
        # About 17.5 characters of the caption fit into an inch, and a line is 0.13 inches high.
        caption_lines = textwrap.wrap(caption, int(17.5 * width))
        figure = Figure(figsize=(width, rows * panel[1] + 0.13 * len(caption_lines)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False, **grid)
        yield axes
        handle_by_label: dict[str, Any] = {}
        for axis in axes.flat:
            axis.set_visible(axis.has_data() or bool(axis.texts))
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                handle_by_label.setdefault(label, handle)
        if caption_lines:
            figure.supxlabel("\n".join(caption_lines), x=0.01, ha="left", fontsize=7.5, color="#555555")
        if handle_by_label:
            # Approximate width of a legend entry in inches.
            entry_width = 0.35 + 0.075 * max(map(len, handle_by_label))
            figure.legend(
                handle_by_label.values(),
                handle_by_label.keys(),
                loc="outside upper left",
                ncols=max(1, min(len(handle_by_label), int(width / entry_width))),
            )
        for file in files:
            file_format = file.suffix[1:]
            figure.savefig(file, format=file_format, metadata=METADATA[file_format])


def whiskers(values: Sequence[float], intervals: Sequence[Sequence[float] | None]) -> list[list[float]]:
    """Return the lengths of the error bars below and above each value, in the format of `Axes.errorbar`.

    >>> whiskers([2.0, 5.0], [[1.5, 3.0], None])
    [[0.5, 0.0], [1.0, 0.0]]
    """
    ends = [interval or (value, value) for value, interval in zip(values, intervals, strict=True)]
    lower_errors = [max(value - low, 0.0) for value, (low, _) in zip(values, ends, strict=True)]
    return [lower_errors, [max(high - value, 0.0) for value, (_, high) in zip(values, ends, strict=True)]]


def level(axis: Axes, value: float, interval: Sequence[float] | None, *, label: str, colour: str) -> None:
    """Draw a reference value as a line across the panel, with its interval shaded."""
    if interval is not None:
        axis.axhspan(interval[0], interval[1], color=colour, alpha=0.13, linewidth=0)
    axis.axhline(value, color=colour, linewidth=1, linestyle="--", label=label)


def honest_limits(axis: Axes, values: Sequence[float], *, least: float) -> None:
    """Set y limits that include `values` and span at least `least`, so that noise does not look large."""
    # Leave a margin of 7.5% above and below the values.
    span = max(least, 1.15 * (max(values) - min(values)))
    middle = (min(values) + max(values)) / 2
    axis.set_ylim(middle - span / 2, middle + span / 2)


def no_grid(axis: Axes, which: Literal["both", "x", "y"]) -> None:
    """Remove grid lines and ticks from an axis whose labels are names."""
    axis.grid(visible=False, axis=which)
    axis.tick_params(axis=which, length=0)
