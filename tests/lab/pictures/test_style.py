"""The style of pictures: files in all formats, the same bytes each time, and limits that do not magnify noise."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("matplotlib")

from mars_jax.lab.pictures.style import beside, honest_limits, level, picture


def drawn(folder, **options):
    folder.mkdir()
    files = beside(folder / "p.png")
    with picture(files, columns=2, caption="tiny/target <&> $5 and $6; n = 3", **options) as axes:
        for axis in axes.flat:
            axis.plot([0, 1], [1, 2], label="exact")
            level(axis, 1.5, (1.4, 1.7), label="target alone", colour="#000000")
    return files


@pytest.mark.slow
def test_a_picture_is_png_svg_and_pdf_and_the_same_bytes_every_time(tmp_path):
    files, again = drawn(tmp_path / "a"), drawn(tmp_path / "b")
    heads = [file.read_bytes()[:8] for file in files]
    assert heads[0][1:4] == b"PNG" and heads[1].startswith(b"<?xml") and heads[2].startswith(b"%PDF")
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in again]


@pytest.mark.slow
def test_a_caption_and_a_legend_stand_once_and_are_text(tmp_path):
    svg = drawn(tmp_path / "a")[1].read_text()
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert "tiny/target &lt;&amp;&gt; $5 and $6; n = 3" in texts
    assert texts.count("exact") == texts.count("target alone") == 1
    assert drawn(tmp_path / "b", legend=False)[1].read_text().count("exact") == 0


def test_panels_that_get_nothing_are_left_out(tmp_path):
    with picture([tmp_path / "p.svg"], columns=2, legend=False) as axes:
        axes[0, 0].plot([0, 1], [7, 8])
    assert not axes[0, 1].get_visible() and axes[0, 0].get_visible()


def test_a_long_caption_is_wrapped_within_the_picture(tmp_path):
    with picture([tmp_path / "p.svg"], caption="many words " * 40) as axes:
        axes[0, 0].plot([0, 1], [7, 8])
    figure = axes[0, 0].figure
    box = figure._supxlabel.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


@pytest.mark.parametrize(
    ("values", "reference", "least", "bounds", "span"),
    [
        ([95.0, 95.2], (94.9, 95.1), 10, (0, 100), 10),  # a difference of nothing looks like nothing
        ([90.0, 96.0], (89.0, 97.0), 10, (0, 100), 32),  # and so does one within the noise
        ([20.0, 90.0], (20.0, 21.0), 10, (0, 100), 80.5),  # a difference that is one fills the axis
        ([99.0, 100.0], (99.0, 100.0), 10, (0, 100), 10),
        ([0.0, 1.0], None, 10, (0, 100), 10),
        ([5.0, 95.0], (5.0, 95.0), 10, (0, 100), 100),  # never more than there is
    ],
)
def test_limits_do_not_make_noise_look_like_a_difference(tmp_path, values, reference, least, bounds, span):
    with picture([tmp_path / "p.svg"]) as axes:
        axis = axes[0, 0]
        axis.plot(range(len(values)), values)
        honest_limits(axis, values, reference, least=least, bounds=bounds)
        low, high = axis.get_ylim()
    assert (high - low) / 1.06 == pytest.approx(span)  # but for the room of markers
    assert low <= min(values) and max(values) <= high
