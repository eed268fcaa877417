"""The models of the collective examples are those of the papers, and their data is what it is said to be."""

import difflib
import re
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
        pytest.param("transformer/model.py", "Transformer", 37_000, 63_082_496, id="the-base-transformer"),
        pytest.param("bert/model.py", "BERT", 30_522, 110_106_428, id="bert-base-for-both-tasks"),
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
        pytest.param("bert/model.py", (4, 10), {0: 0.25, 3: 1.0, 4: 1.0, 7: 0.5, 10: 0.0}, id="linear"),
        pytest.param("transformer/model.py", (256, 16), {3: 1 / 256, 15: 1 / 64, 63: 1 / 128}, id="noam"),
    ],
)
def test_a_learning_rate_grows_and_falls(load, path, options, expected):
    rate = load(path).rate
    assert {step: rate(step, *options) for step in expected} == pytest.approx(expected)


def test_what_makes_a_script_a_job_are_the_same_lines_in_all_examples():
    """So another run of each, with --bf16 or --local-sgd, need not be made in every example."""
    added = {}
    for example in ("resnet50", "transformer", "bert"):
        alone, together = (
            (EXAMPLES / example / name).read_text().splitlines() for name in ("single.py", "train.py")
        )
        added[example] = [line[2:] for line in difflib.ndiff(alone, together) if line.startswith("+ ")]
    assert added["transformer"] == added["resnet50"]
    assert added["bert"] == added["resnet50"]
    text = "\n".join(added["resnet50"])
    assert re.findall(r'add_argument\("(--[a-z0-9-]+)"', text) == ["--bf16", "--local-sgd"]
    assert re.findall(r"(\w+)=options\.(\w+)", text) == [("wire_dtype", "bf16"), ("local_sgd", "local_sgd")]


MAN, DOG = ("man", None, True), ("dog", None, False)


@pytest.mark.parametrize(
    ("words", "english", "german"),
    [
        pytest.param(
            ("statement", "see", MAN, ("bird", "small", False)),
            "the man sees a small bird .",
            "der Mann sieht einen kleinen Vogel .",
            id="an-object-has-the-accusative",
        ),
        pytest.param(
            ("question", "know", ("horse", "big", True), ("child", "old", False)),
            "does the big horse know an old child ?",
            "kennt das große Pferd ein altes Kind ?",
            id="a-question-begins-with-the-verb",
        ),
        pytest.param(
            ("denial", "hear", ("woman", "old", False), MAN),
            "an old woman does not hear the man .",
            "eine alte Frau hört den Mann nicht .",
            id="what-is-definite-is-denied-at-the-end",
        ),
        pytest.param(
            ("denial", "look for", DOG, ("cat", "old", False)),
            "a dog does not look for an old cat .",
            "ein Hund sucht keine alte Katze .",
            id="what-is-not-is-denied-by-its-article",
        ),
        pytest.param(
            ("today", "look for", ("teacher", "young", False), ("girl", "quiet", True)),
            "today a young teacher looks for the quiet girl .",
            "heute sucht ein junger Lehrer das stille Mädchen .",
            id="behind-an-adverb-comes-the-verb",
        ),
    ],
)
def test_the_grammar_speaks_german(load, words, english, german):
    assert load("transformer/grammar.py").sentence(*words) == (english, german)


def test_generated_pairs_are_the_same_each_time_and_no_two_are_alike(load):
    pairs = load("transformer/grammar.py").pairs
    assert pairs(600) == pairs(600)
    assert len({english for english, _ in pairs(600)}) == 600


def test_a_file_of_pairs_is_read_and_a_line_without_a_tabulator_is_named(load, tmp_path):
    read = load("transformer/sentences.py").read
    file = tmp_path / "pairs"
    file.write_text("one\teins\ntwo\n")
    with pytest.raises(SystemExit, match=r"pairs:2: found 'two'; expected two sentences and a tabulator"):
        read(file)
    file.write_text("one\teins\n")
    assert read(file) == [("one", "eins")]


def test_no_word_of_a_translation_depends_on_those_behind_it(load):
    module = load("transformer/model.py")
    torch.manual_seed(0)
    model = module.Transformer(20, 1, 16, 2).eval()
    source, target = torch.tensor([[1, 7, 8, 2, 0]]), torch.tensor([[1, 5, 6, 7]])
    changed = torch.tensor([[1, 5, 9, 4]])
    logits, others = model(source, target), model(source, changed)
    assert torch.allclose(logits[:, :2], others[:, :2], atol=1e-6)
    assert not torch.allclose(logits[:, 2:], others[:, 2:], atol=1e-6)
    assert torch.allclose(
        model(source[:, :4], target), logits, atol=1e-6
    )  # what pads a batch is not looked at


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


def test_a_piece_of_text_is_followed_by_the_next_one_as_often_as_by_another(load):
    text = load("bert/text.py")
    document = [f"w{number}" for number in range(4000)]
    numbers = text.vocabulary([document], 5000)
    pieces = text.Pieces([document], numbers, 43)
    follows = []
    for words, hidden, is_next in pieces:
        shown = torch.where(hidden == text.NOT_HIDDEN, words, hidden).tolist()
        assert [shown[0], shown[21], shown[42]] == [text.BEGIN, text.BETWEEN, text.BETWEEN]
        assert int((hidden != text.NOT_HIDDEN).sum()) == 6  # 15 % of 40
        first = shown[1:21]
        assert first == list(range(first[0], first[0] + 20))
        follows.append(shown[22] == first[-1] + 1)
        assert follows[-1] or not is_next
    assert 0.4 < sum(follows) / len(follows) < 0.6
    again = pieces[3][0]
    pieces.set_epoch(1)
    assert not torch.equal(again, pieces[3][0])


def test_a_text_that_is_too_short_is_refused(load):
    text = load("bert/text.py")
    with pytest.raises(SystemExit, match="the longest document has 3 words; expected 16 for two pieces"):
        text.Pieces([["a", "b", "c"]], text.vocabulary([["a"]], 10), 19)


@pytest.mark.parametrize("script", ["single.py", "train.py"])
def test_by_default_sixteen_translating_trainers_have_a_batch_each(script):
    """So many the README speaks of: eight in each of two pods."""
    text = (EXAMPLES / "transformer" / script).read_text()
    pairs, test, batch = (
        int(re.findall(rf'"--{flag}", type=int, default=([0-9_]+)', text)[0])
        for flag in ("generate", "test", "batch-size")
    )
    assert (pairs - test) // 16 >= batch
