"""Small data sets for examples that read files."""

import random
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_sample_images

__all__ = ["write_pictures", "write_text"]


def write_pictures(folder: Path) -> list[str]:
    """Write 32 training and 8 validation images, which are crops of scikit-learn's two pictures."""
    chance = random.Random(0)  # noqa: S311 not used for secrets
    for name, picture in zip(("temple", "flower"), load_sample_images().images, strict=True):
        for part, number in (("train", 16), ("val", 4)):
            (folder / part / name).mkdir(parents=True)
            for each in range(number):
                left, upper = chance.randrange(600), chance.randrange(380)
                piece = Image.fromarray(picture).crop((left, upper, left + 40, upper + 40))
                piece.save(folder / part / name / f"{each}.jpg")
    return [str(folder)]


def write_text(path: Path) -> list[str]:
    """Write a text of 300 words, which gives 32 training samples of eight tokens, and two test samples."""
    chance, words = random.Random(0), ("north", "east", "south", "west", "up", "down")  # noqa: S311
    path.write_text(" ".join(chance.choice(words) for _ in range(300)))
    return [str(path)]
