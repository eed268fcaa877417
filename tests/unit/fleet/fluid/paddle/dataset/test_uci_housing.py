"""Thirteen features and a price: of the file that a folder has, or of scikit-learn's patients."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_diabetes

import fleet.fluid.paddle as paddle
from fleet.errors import ConfigurationError


@pytest.fixture
def houses(tmp_path: Path) -> Path:
    """Return a folder with the original's file, of ten houses on two lines each as the original has them."""
    lines = []
    for house in range(10):
        numbers = [f"{house + column:.3f}" for column in range(14)]
        lines += [" " + "  ".join(numbers[:11]), "  " + " ".join(numbers[11:])]
    (tmp_path / "uci_housing").mkdir()
    (tmp_path / "uci_housing" / "housing.data").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_the_named_file_is_read_and_normalised(houses: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLEET_DATASET_DIR", str(houses))
    train, test = list(paddle.dataset.uci_housing.train()()), list(paddle.dataset.uci_housing.test()())
    assert (len(train), len(test)) == (8, 2)
    features, price = train[0]
    np.testing.assert_allclose(features, np.full(13, -4.5 / 9))  # (0 - the mean) / (the highest - the lowest)
    assert price.tolist() == [13.0]
    assert [price.tolist() for _, price in test] == [[21.0], [22.0]]


def test_a_folder_can_be_an_argument(houses: Path):
    assert len(list(paddle.dataset.uci_housing.train(houses)())) == 8


def test_without_a_folder_patients_take_the_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FLEET_DATASET_DIR", raising=False)
    samples = [*paddle.dataset.uci_housing.train()(), *paddle.dataset.uci_housing.test()()]
    assert len(samples) == 442
    features = np.stack([features for features, _ in samples])
    assert features.shape == (442, 13)
    np.testing.assert_allclose(features.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(np.ptp(features, axis=0), 1)
    np.testing.assert_allclose([price[0] for _, price in samples], load_diabetes().target / 10)


def test_a_folder_without_the_file_is_an_error(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"housing\.data cannot be read.*FLEET_DATASET_DIR"):
        paddle.dataset.uci_housing.train(tmp_path)


def test_a_cut_file_is_an_error(houses: Path):
    path = houses / "uci_housing" / "housing.data"
    path.write_text(path.read_text().rsplit(maxsplit=1)[0])
    with pytest.raises(ConfigurationError, match="139 numbers; expected a multiple of 14"):
        paddle.dataset.uci_housing.test(houses)
