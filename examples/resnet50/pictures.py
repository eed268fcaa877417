"""Pictures in folders: one folder per class."""

import math
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of red, green and blue in ImageNet."""
SUFFIXES = {".bmp", ".jpeg", ".jpg", ".png", ".webp"}
MIDDLE = 224 / 256
"""How much of a picture's shorter edge is seen when nothing is left to chance."""


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Each item is a picture, float32[3, size, size], and the number of its class.

    Parameters
    ----------
    folder : Path
        Has a folder for each class, with pictures in it or below it.
    size : int
        Pixels of an edge.
    by_chance : bool
        Show another part of each picture in each epoch, or its mirror image; else its middle. Which part
        follows from the epoch and the picture alone, so any number of processes sees the same ones.
    """

    def __init__(self, folder: Path, size: int, *, by_chance: bool) -> None:
        self.classes = sorted(each.name for each in folder.iterdir() if each.is_dir())
        self.files = [
            (path, number)
            for number, name in enumerate(self.classes)
            for path in sorted((folder / name).rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        if not self.files:
            raise SystemExit(
                f"{folder} has no pictures; expected {folder}/CLASS/*.jpg, or {sorted(SUFFIXES)}"
            )
        self.size, self.by_chance, self.epoch = size, by_chance, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        chance = random.Random(f"{self.epoch} {index}")  # noqa: S311 no secret
        with Image.open(path) as file:
            picture = file.convert("RGB")
        box = any_part(picture.size, chance) if self.by_chance else middle(picture.size)
        shown = picture.resize((self.size, self.size), Image.Resampling.BILINEAR, box)
        pixels = (np.asarray(shown, dtype=np.float32) / 255 - MEAN) / DEVIATION
        if self.by_chance and chance.random() < 0.5:
            pixels = pixels[:, ::-1]
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32)), label


Box = tuple[float, float, float, float]
"""Left, upper, right and lower edge, in pixels."""


def middle(size: tuple[int, int]) -> Box:
    """Return the square in the middle of a picture of this width and height."""
    width, height = size
    edge = min(size) * MIDDLE
    left, upper = (width - edge) / 2, (height - edge) / 2
    return left, upper, left + edge, upper + edge


def any_part(size: tuple[int, int], chance: random.Random) -> Box:
    """Return a part of a picture: 8 to 100 % of it, 3:4 to 4:3, as in arXiv:1409.4842; else its middle."""
    width, height = size
    for _ in range(10):
        area = width * height * chance.uniform(0.08, 1)
        ratio = math.exp(chance.uniform(math.log(3 / 4), math.log(4 / 3)))
        across, down = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if across <= width and down <= height:
            left, upper = chance.uniform(0, width - across), chance.uniform(0, height - down)
            return left, upper, left + across, upper + down
    return middle(size)
