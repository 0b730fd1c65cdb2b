"""Tests of pictures: a distinct style per rule, reproducible bytes, and axis limits that do not magnify noise."""

import pytest

from mars_jax.lab.pictures import COLOURS, MARKERS, honest_limits, level, look, picture
from mars_jax.verify import rules

pytest.importorskip("matplotlib")


def test_no_two_rules_look_alike():
    looks = [look(name) for name in rules()]
    assert len(set(looks)) == len(looks) <= len(COLOURS) * len(MARKERS)
    assert look("mars max_relaxed_run=2 theta=0.9") == look("mars") != look("mars(gap)")


def draw(folder):
    files = [folder / f"p.{kind}" for kind in ("png", "svg", "pdf")]
    folder.mkdir()
    with picture(files, columns=3, caption="tiny/target <&> $5 and $6; n = 3") as axes:
        for axis in axes.flat[:2]:
            axis.plot([0, 1], [1, 2], label="exact")
            level(axis, 1.5, (1.4, 1.7), label="target alone", colour="#000000")
    assert not axes[0, 2].get_visible()
    return files


@pytest.mark.slow
def test_a_picture_has_the_same_bytes_every_time_and_text_that_can_be_searched(tmp_path):
    files, redrawn = draw(tmp_path / "a"), draw(tmp_path / "b")
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in redrawn]
    svg = files[1].read_text()
    assert "tiny/target &lt;&amp;&gt; $5 and $6; n = 3" in svg
    assert svg.count(">exact</text>") == svg.count(">target alone</text>") == 1


@pytest.mark.parametrize(("values", "span"), [([95.0, 95.2], 10), ([20.0, 90.0], 80.5), ([0.0, 1.0], 10)])
def test_limits_do_not_make_noise_look_like_a_difference(tmp_path, values, span):
    with picture([tmp_path / "p.svg"]) as axes:
        axes[0, 0].plot(values)
        honest_limits(axes[0, 0], values, least=10)
        low, high = axes[0, 0].get_ylim()
    assert high - low == pytest.approx(span) and low <= min(values) and max(values) <= high
