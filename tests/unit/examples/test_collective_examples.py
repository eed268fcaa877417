"""The models of the collective examples are those of the papers, and their data is what it is said to be."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Return what a module of an example has."""

    def run(path: str) -> SimpleNamespace:
        monkeypatch.syspath_prepend(str((EXAMPLES / path).parent))
        return SimpleNamespace(**runpy.run_path(str(EXAMPLES / path)))

    return run


@pytest.mark.parametrize(
    ("path", "model", "classes_or_words", "expected"),
    [
        pytest.param("resnet50/model.py", "ResNet", 1000, 25_557_032, id="resnet-50"),
    ],
)
def test_by_default_a_model_has_the_papers_number_of_parameters(
    load, path, model, classes_or_words, expected
):
    with torch.device("meta"):
        made = getattr(load(path), model)(classes_or_words)
    assert sum(parameter.numel() for parameter in made.parameters()) == expected


@pytest.mark.parametrize(
    ("path", "options", "expected"),
    [
        pytest.param("resnet50/model.py", (4, 10), {0: 0.25, 3: 1.0, 4: 1.0, 7: 0.5, 10: 0.0}, id="cosine"),
    ],
)
def test_a_learning_rate_grows_and_falls(load, path, options, expected):
    rate = load(path).rate
    assert {step: rate(step, *options) for step in expected} == pytest.approx(expected)


def test_a_picture_shows_its_middle_or_another_part_in_each_epoch(load, tmp_path):
    (tmp_path / "left").mkdir()
    (tmp_path / "right").mkdir()
    grey = np.linspace(0, 255, 64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3)
    for name in ("left/a.png", "right/b.jpg"):
        Image.fromarray(grey).save(tmp_path / name)
    (tmp_path / "right" / "notes.txt").write_text("no picture")
    pictures = load("resnet50/pictures.py").Pictures

    middle = pictures(tmp_path, 56, by_chance=False)
    assert middle.classes == ["left", "right"]
    assert [label for _, label in middle] == [0, 1]
    pixels, _ = middle[0]
    assert pixels.shape == (3, 56, 56)
    expected = (grey[4:60, 4:60, 0] / 255 - 0.485) / 0.229  # 56 of 64 pixels, each as it is
    assert torch.allclose(pixels[0], torch.from_numpy(expected).float(), atol=1e-5)

    parts = pictures(tmp_path, 8, by_chance=True)
    first, _ = parts[0]
    assert torch.equal(first, parts[0][0])
    parts.set_epoch(1)
    assert not torch.equal(first, parts[0][0])


def test_a_folder_without_pictures_is_named(load, tmp_path):
    with pytest.raises(SystemExit, match="has no pictures; expected"):
        load("resnet50/pictures.py").Pictures(tmp_path, 8, by_chance=False)
