"""Tasks whose answer stands in the context and nowhere else: what a cache loses although perplexity hides it.

A sample is one context and several questions about it. Questions and answers are forced, so that one forward pass gives
the likelihood of each answer and whether greedy decoding would have written it. Samples are drawn from a seed: the same
tokenizer, text and numbers give the same samples.
"""

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .texts import split_sentences

CUE_WORDS, QUOTED_WORDS = 6, 12  # of a sentence that is quoted: given, and asked for
CUE_IDS, COPIED_IDS, ID_LENGTH = 2, 6, 6

NOUNS = """
    airport balloon bicycle blanket bottle bridge butter button camera carpet castle cheese circle coffee cookie desert
    diamond dragon eagle engine forest garden giraffe guitar hammer island jacket kitchen ladder lantern marble market
    mirror mountain ocean orange painter pencil piano planet rabbit river rocket saddle spider ticket tiger tunnel
    turtle valley village violin wagon whistle window winter
"""


@dataclass(frozen=True)
class Question:
    """Token ids of a question, which follows the context, and of its answer, which follows the question."""

    text: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """Token ids of a context, and what is asked about it."""

    context: tuple[int, ...]
    questions: tuple[Question, ...]


class _Writer:
    """Turns texts into samples with one tokenizer."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        empty, bos = tokenizer("").input_ids, tokenizer.bos_token_id
        self._start = (bos,) if bos is not None and bos in empty else ()

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False).input_ids)

    def sample(self, context: str, questions: list[tuple[str, str]]) -> Sample:
        """A sample from a context and pairs of a question and its answer."""
        asked = tuple(Question(self.encode(text), self.encode(answer)) for text, answer in questions)
        return Sample(self._start + self.encode(context), asked)

    def take(self, parts: list[str], budget: int, task: str) -> list[str]:
        """The first of `parts` that together have no more than `budget` tokens.

        Raises:
            ValueError: if there are not enough of them, or the first is too long already.
        """
        taken, left = [], budget
        for part in parts:
            left -= len(self.encode(" " + part))
            if left < 0:
                break
            taken.append(part)
        else:
            raise ValueError(
                f"the text has {budget - left} tokens of prose and a {task} context needs {budget}: give a longer text "
                "or a smaller length."
            )
        if not taken:
            raise ValueError(f"a {task} context of this length has no room for any text: give a larger length.")
        return taken


def _mk_needle(writer: _Writer, sentences: list[str], length: int, questions: int, rng: random.Random) -> Sample:
    """Several keys with a number each, at any depth in prose; every number is asked for."""
    nouns = NOUNS.split()
    if questions > len(nouns):
        raise ValueError(f"questions={questions} is not possible: mk_needle has {len(nouns)} different keys.")
    keys, numbers = rng.sample(nouns, questions), rng.sample(range(10_000, 100_000), questions)
    needles = [f"The special magic number for {key} is {number}." for key, number in zip(keys, numbers, strict=True)]
    opening = "Remember the special magic numbers that are hidden in this text: you will be asked for them.\n\n"
    spent = sum(len(writer.encode(" " + text)) for text in (opening, *needles))
    prose = writer.take(sentences, length - spent, "mk_needle")
    places = [int(len(prose) * (i + rng.random()) / questions) for i in range(questions)]
    for place, needle in reversed(list(zip(places, needles, strict=True))):
        prose.insert(place, needle)
    asked = [
        (
            f"\n\nQuestion: Which special magic number for {key} does the text mention?\n"
            f"Answer: The special magic number for {key} is",
            f" {number}",
        )
        for key, number in zip(keys, numbers, strict=True)
    ]
    return writer.sample(opening + " ".join(prose), asked)


def _sent_recall(writer: _Writer, sentences: list[str], length: int, questions: int, rng: random.Random) -> Sample:
    """Prose, of which a sentence is quoted from its first words on."""
    prose = writer.take(sentences, length, "sent_recall")
    cues = [tuple(sentence.split()[:CUE_WORDS]) for sentence in prose]
    long = [
        words
        for sentence, cue in zip(prose, cues, strict=True)
        if len(words := sentence.split()) >= CUE_WORDS + QUOTED_WORDS and cues.count(cue) == 1
    ]
    if len(long) < questions:
        raise ValueError(
            f"a context of {length} tokens of this text has {len(long)} sentences of {CUE_WORDS + QUOTED_WORDS} words "
            f"to quote, and questions={questions}: ask fewer, or take a larger length or another text."
        )
    asked = [
        (
            '\n\nQuote from the text above: "' + " ".join(words[:CUE_WORDS]),
            " " + " ".join(words[CUE_WORDS : CUE_WORDS + QUOTED_WORDS]),
        )
        for words in rng.sample(long, questions)
    ]
    return writer.sample(" ".join(prose), asked)


def _copy_ids(writer: _Writer, sentences: list[str], length: int, questions: int, rng: random.Random) -> Sample:
    """A list of random identifiers, which goes on from two of them. Nothing in it can be guessed."""
    letters = string.ascii_lowercase + string.digits
    drawn = ["".join(rng.choices(letters, k=ID_LENGTH)) for _ in range(length)]
    ids = writer.take([one + "," for one in drawn], length, "copy_ids")
    places = len(ids) - CUE_IDS - COPIED_IDS + 1
    if questions > places:
        raise ValueError(
            f"a list of {len(ids)} identifiers, {length} tokens, can be asked at {max(places, 0)} places and "
            f"questions={questions}: ask fewer, or take a larger length."
        )
    asked = []
    for first in rng.sample(range(places), questions):
        cue, rest = ids[first : first + CUE_IDS], ids[first + CUE_IDS : first + CUE_IDS + COPIED_IDS]
        asked.append(("\nA part of the same list: " + " ".join(cue), " " + " ".join(rest)))
    return writer.sample("A list: " + " ".join(ids), asked)


TASKS: dict[str, Callable[..., Sample]] = {
    "mk_needle": _mk_needle,
    "sent_recall": _sent_recall,
    "copy_ids": _copy_ids,
}


def make_samples(
    task: str, tokenizer: Any, text: str, *, contexts: int = 8, length: int = 1600, questions: int = 4, seed: int = 0
) -> list[Sample]:
    """Draw `contexts` samples of a task.

    Args:
        task: `"mk_needle"`, `"sent_recall"` or `"copy_ids"`.
        tokenizer: the model's; contexts begin with its BOS token if it adds one.
        text: where prose is taken from. Each context begins at another sentence, and the end goes on at the beginning.
        contexts: samples to draw.
        length: tokens of a context, at most (the tokenizer may join two of them).
        questions: questions a context.
        seed: another one gives other samples.

    Raises:
        ValueError: for an unknown task, numbers that are too small, or a text that is too short.
    """
    if task not in TASKS:
        raise ValueError(f"task={task!r} does not exist: choose from {', '.join(TASKS)}.")
    if contexts < 1 or questions < 1:
        raise ValueError(f"contexts={contexts} and questions={questions} must be at least 1.")
    writer, sentences = _Writer(tokenizer), split_sentences(text)
    samples = []
    for index in range(contexts):
        rng = random.Random(f"{task} {seed} {index}")
        begin = rng.randrange(max(len(sentences), 1))
        samples.append(TASKS[task](writer, sentences[begin:] + sentences[:begin], length, questions, rng))
    return samples
