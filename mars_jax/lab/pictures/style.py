"""One style for all pictures: a figure of panels that fit beside each other, with a caption, as PNG, SVG and PDF.

It needs matplotlib, which is imported when a picture is drawn, without pyplot: that would choose a window system and
keep the figure. The same data give the same bytes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mars_jax.core.errors import MarsError
from mars_jax.lab.pictures.palette import GREY, LIGHT

FORMATS = ("png", "svg", "pdf")
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib, so a picture is the same everywhere
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E8E8E8",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.3,
    "lines.markersize": 5.5,
    "errorbar.capsize": 2,
    "figure.dpi": 100,
    "figure.constrained_layout.w_pad": 0.09,  # room for other fonts, in which a browser may show an SVG
    "savefig.dpi": 160,
    "svg.fonttype": "none",  # texts stay texts: they can be searched, and tests read them
    "svg.hashsalt": "mars-jax",
    "pdf.fonttype": 42,
    "text.parse_math": False,  # a name with two dollars is no formula
}
METADATA = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
"""Metadata left out, which would give the same picture other bytes tomorrow."""


def check_installed() -> None:
    """Raise MarsError where pictures could not be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MarsError("plots need the package matplotlib: pip install matplotlib.") from None


def beside(path: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """The files of one picture.

    >>> [file.name for file in beside(Path("speed.png"))]
    ['speed.png', 'speed.svg', 'speed.pdf']
    """
    return [path.with_suffix(f".{name}") for name in formats]


@contextmanager
def picture(
    files: Sequence[Path],
    *,
    rows: int = 1,
    columns: int = 1,
    panel: tuple[float, float] = (4.2, 3.0),
    caption: str = "",
    legend: bool = True,
    **grid: Any,
) -> Iterator[Any]:
    """Panels to draw on, which become files when the block ends.

    Args:
      files: to write; their suffixes say the formats.
      rows, columns: of panels.
      panel: inches of one, width and height.
      caption: below the panels: the pair, the device, n and the date.
      legend: name everything that is drawn with a label, once, above the panels.
      **grid: of `Figure.subplots`, such as `sharey=True`.

    Yields:
      The axes, an array [rows, columns]; those that get nothing are left out of the picture.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        width = columns * panel[0]
        lines = textwrap.wrap(caption, int(17.5 * width))
        figure = Figure(figsize=(width, rows * panel[1] + 0.13 * len(lines)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False, **grid)
        yield axes
        for axis in axes.flat:
            axis.set_visible(axis.has_data() or bool(axis.texts))
        if lines:
            figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7.5, color="#555555")
        if legend:
            _name(figure, axes, width)
        for file in files:
            staged, kind = file.with_name(f"{file.name}.partial"), file.suffix[1:]
            figure.savefig(staged, format=kind, metadata=METADATA[kind])
            staged.replace(file)


def _name(figure: Any, axes: Any, width: float) -> None:
    """The legend, in as many columns as fit."""
    named: dict[str, Any] = {}
    for axis in axes.flat:
        if axis.get_visible():
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                named.setdefault(label, handle)
    if named:
        longest = 0.35 + 0.075 * max(map(len, named))  # inches of an entry, about
        columns = max(1, min(len(named), int(width / longest)))
        figure.legend(named.values(), named.keys(), loc="outside upper left", ncols=columns)


def whiskers(values: Sequence[float], intervals: Sequence[Sequence[float] | None]) -> list[list[float]]:
    """Intervals as `Axes.errorbar` takes them: what is below the values, and what is above.

    >>> whiskers([2.0, 5.0], [[1.5, 3.0], None])
    [[0.5, 0.0], [1.0, 0.0]]
    """
    pairs = list(zip(values, intervals, strict=True))
    below = [0.0 if found is None else max(value - found[0], 0.0) for value, found in pairs]
    return [below, [0.0 if found is None else max(found[1] - value, 0.0) for value, found in pairs]]


def level(axis: Any, value: float, interval: Sequence[float] | None, *, label: str, colour: str) -> None:
    """A value that others are compared with, as a line over the whole panel, its interval shaded."""
    if interval is not None:
        axis.axhspan(*interval, color=colour, alpha=0.13, linewidth=0)
    axis.axhline(value, color=colour, linewidth=1, linestyle="--", label=label)


def honest_limits(
    axis: Any,
    values: Sequence[float],
    reference: Sequence[float] | None = None,
    *,
    least: float,
    bounds: tuple[float, float] = (float("-inf"), float("inf")),
) -> None:
    """Limits of y that do not make noise look like a difference.

    The axis spans at least `least`, and four times the interval of what the others are compared with.

    Args:
      axis: whose limits are set.
      values: all that is drawn, ends of intervals included.
      reference: that interval.
      least: in the units of y.
      bounds: of what y can be.
    """
    low, high = min(values), max(values)
    noise = 0.0 if reference is None else reference[1] - reference[0]
    span = max(least, 4 * noise, 1.15 * (high - low))
    middle = (low + high) / 2
    bottom, top = middle - span / 2, middle + span / 2
    if top > bounds[1]:
        bottom, top = max(bounds[1] - span, bounds[0]), bounds[1]
    if bottom < bounds[0]:
        bottom, top = bounds[0], min(bounds[0] + span, bounds[1])
    room = 0.03 * (top - bottom)  # for markers on a bound
    axis.set_ylim(bottom - room, top + room)


def zero_line(axis: Any, at: float = 0.0) -> None:
    """Draw a line where there is no difference."""
    axis.axhline(at, color=GREY, linewidth=0.9, linestyle=":")


def no_grid(axis: Any, which: str) -> None:
    """An axis of names has no lines and no ticks."""
    axis.grid(visible=False, axis=which)
    axis.tick_params(axis=which, length=0)
    axis.spines[["bottom" if which == "x" else "left"]].set_color(LIGHT)
