from __future__ import annotations

from fleet_operator.cli.page import draw_loss_curves


def test_a_curve_is_drawn_for_light_pages_and_for_dark_ones():
    picture = draw_loss_curves({"trainer-0": {1: 2.0, 2: 1.0}, "trainer-1": {}}, "digits")
    assert picture.light.startswith(b"\x89PNG")
    assert picture.dark.startswith(b"\x89PNG")
    assert picture.light != picture.dark
