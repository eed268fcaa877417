from __future__ import annotations

from fleet_operator.cli.curve import draw_loss_curves


def test_a_curve_is_drawn(tmp_path):
    path = tmp_path / "loss.png"
    assert draw_loss_curves({"trainer-0": {1: 2.0, 2: 1.0}, "trainer-1": {}}, "digits", path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_nothing_is_drawn_from_nothing(tmp_path):
    path = tmp_path / "loss.png"
    assert not draw_loss_curves({"trainer-0": {}}, "digits", path)
    assert not path.exists()
