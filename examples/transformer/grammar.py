"""Sentences in English and what they are in German, by a small grammar of our own.

A translation has to get right in what they differ: German nouns have three genders, which articles and
adjectives show beside the case; the verb stands second or first; "not" goes to the end, or into the article.
"""

import random

NOUNS = {
    "man": ("Mann", "m"),
    "dog": ("Hund", "m"),
    "teacher": ("Lehrer", "m"),
    "bird": ("Vogel", "m"),
    "woman": ("Frau", "f"),
    "cat": ("Katze", "f"),
    "mouse": ("Maus", "f"),
    "neighbour": ("Nachbarin", "f"),
    "child": ("Kind", "n"),
    "horse": ("Pferd", "n"),
    "girl": ("Mädchen", "n"),
    "sheep": ("Schaf", "n"),
}
ADJECTIVES = {
    "old": "alt",
    "young": "jung",
    "small": "klein",
    "big": "groß",
    "quiet": "still",
    "clever": "klug",
}
VERBS = {
    "see": "sieht",
    "hear": "hört",
    "find": "findet",
    "look for": "sucht",
    "know": "kennt",
    "love": "liebt",
}
ADVERBS = {"today": "heute", "here": "hier", "often": "oft", "now": "jetzt"}
DEFINITE = {
    "subject": {"m": ("der", "e"), "f": ("die", "e"), "n": ("das", "e")},
    "object": {"m": ("den", "en"), "f": ("die", "e"), "n": ("das", "e")},
}
INDEFINITE = {
    "subject": {"m": ("ein", "er"), "f": ("eine", "e"), "n": ("ein", "es")},
    "object": {"m": ("einen", "en"), "f": ("eine", "e"), "n": ("ein", "es")},
}
"""Article and adjective's ending, by case and gender."""


Phrase = tuple[str, str | None, bool]
"""A noun, an adjective of it or none, and whether its article is definite; the words in English."""


def pairs(number: int, seed: int = 0) -> list[tuple[str, str]]:
    """Return so many sentences, no two alike, each with its translation."""
    chance = random.Random(seed)  # noqa: S311 no secret
    found: dict[str, str] = {}
    while len(found) < number:
        kind = chance.choice(["statement", "question", "denial", *ADVERBS])
        subject, object_ = (
            (chance.choice(list(NOUNS)), chance.choice([None, *ADJECTIVES]), chance.random() < 0.5)
            for _ in range(2)
        )
        english, german = sentence(kind, chance.choice(list(VERBS)), subject, object_)
        found[english] = german
    return list(found.items())


def sentence(kind: str, verb: str, subject: Phrase, object_: Phrase) -> tuple[str, str]:
    """Return a sentence and its translation: a statement, a question, a denial, or behind an adverb."""
    who, wer = phrase("subject", *subject)
    whom, wen = phrase("object", *object_)
    first, *rest = verb.split()
    does, tut = " ".join([f"{first}s", *rest]), VERBS[verb]
    if kind == "question":
        return f"does {who} {verb} {whom} ?", f"{tut} {wer} {wen} ?"
    if kind == "denial":
        return (
            f"{who} does not {verb} {whom} .",
            f"{wer} {tut} {f'{wen} nicht' if object_[2] else f'k{wen}'} .",
        )
    if kind in ADVERBS:
        return f"{kind} {who} {does} {whom} .", f"{ADVERBS[kind]} {tut} {wer} {wen} ."
    return f"{who} {does} {whom} .", f"{wer} {tut} {wen} ."


def phrase(case: str, noun: str, adjective: str | None, definite: bool) -> tuple[str, str]:
    """Return a noun with its article and its adjective in both languages."""
    german, gender = NOUNS[noun]
    artikel, ending = (DEFINITE if definite else INDEFINITE)[case][gender]
    article = "the" if definite else "an" if (adjective or noun)[0] in "aeiou" else "a"
    if adjective is None:
        return f"{article} {noun}", f"{artikel} {german}"
    return f"{article} {adjective} {noun}", f"{artikel} {ADJECTIVES[adjective]}{ending} {german}"
