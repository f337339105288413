import numpy as np
import pytest

from dovetail.reports.charts import LIGHT, device_colours, device_styles, linear_rgb, oklab


def least_distance(colours):
    """The least distance of two of them in OKLab; black and white are 1 apart."""
    spots = oklab(linear_rgb(colours))
    apart = np.linalg.norm(spots[:, None] - spots[None], axis=2)
    np.fill_diagonal(apart, np.inf)
    return apart.min()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("count", "apart"), [(8, 0.07), (16, 0.07), (64, 0.05), (128, 0.035)])
def test_every_device_has_a_colour_that_is_told_from_all_others(count, apart, dark):
    colours = device_colours(count, dark=dark)
    assert len(set(colours)) == count
    assert least_distance(colours) >= apart


def test_a_device_keeps_its_colour_however_many_there_are():
    assert device_colours(40)[:12] == device_colours(12)
    assert device_colours(3) == LIGHT[:3]
    assert device_colours(0) == ()


def test_colours_begin_again_beyond_what_can_be_told_apart():
    many = device_colours(2000)
    assert len(many) == 2000
    assert len(set(many)) > 400


def test_a_style_sheet_has_each_colour_once_for_light_and_once_for_dark():
    style = device_styles(9)
    assert style.count("--d8:#") == 2
    assert ".d8{fill:var(--d8);background:var(--d8)}" in style
    assert device_styles(0) == ""
