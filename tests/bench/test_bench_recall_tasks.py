"""Recall samples: drawn from a seed, as long as asked for, and every answer stands in its context once."""

import pytest

from hf_kvcache.bench.recall_tasks import TASKS, make_samples
from hf_kvcache.bench.texts import python_topics, read_texts, split_sentences

# Long enough to quote, each with its own beginning.
PROSE = " ".join(
    f"Sentence {i} of this text begins in its own way and then goes on with a few more words up to number {i + 7}."
    for i in range(60)
)
SIZES = {"contexts": 3, "length": 1500, "questions": 3}


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_gives_the_same_samples_again(task, letters):
    samples = make_samples(task, letters, PROSE, **SIZES)
    assert samples == make_samples(task, letters, PROSE, **SIZES)
    assert samples[:1] == make_samples(task, letters, PROSE, **SIZES | {"contexts": 1})
    assert len({sample.context for sample in samples}) == 3
    assert samples != make_samples(task, letters, PROSE, **SIZES, seed=1)


@pytest.mark.parametrize("task", TASKS)
def test_contexts_have_the_length_and_begin_with_bos(task, letters):
    for sample in make_samples(task, letters, PROSE, **SIZES):
        assert 1200 < len(sample.context) <= 1520
        assert sample.context[0] == letters.bos_token_id
        assert len(sample.questions) == 3
        assert all(letters.bos_token_id not in question.text + question.answer for question in sample.questions)


def test_each_number_is_hidden_once_in_its_own_part(letters):
    for sample in make_samples("mk_needle", letters, PROSE, **SIZES):
        context = letters.decode(sample.context)
        places = []
        for question in sample.questions:
            key = letters.decode(question.text).rpartition(" for ")[2].removesuffix(" is")
            needle = f"The special magic number for {key} is{letters.decode(question.answer)}."
            assert context.count(needle) == 1
            places.append(context.index(needle) / len(context))
        assert places == sorted(places)
        assert places[0] < 0.45 < places[2]


@pytest.mark.parametrize(
    ("task", "asking"),
    [("sent_recall", '\n\nQuote from the text above: "'), ("copy_ids", "\nA part of the same list: ")],
)
def test_what_is_asked_for_is_how_the_context_goes_on(task, asking, letters):
    for sample in make_samples(task, letters, PROSE, **SIZES):
        context = letters.decode(sample.context)
        for question in sample.questions:
            cue = letters.decode(question.text)[len(asking) :]
            answer = letters.decode(question.answer)
            assert context.count(cue) == 1
            assert cue + answer in context
            assert len(cue.split()) == (6 if task == "sent_recall" else 2)
            assert len(answer.split()) == (12 if task == "sent_recall" else 6)


def test_a_sentence_whose_beginning_is_not_its_own_is_not_asked_for(letters):
    twins = " ".join(
        f"The same six words begin every one of these sentences which then go on up to letter {i}." for i in "abcd"
    )
    with pytest.raises(ValueError, match="has 0 sentences of 18 words"):
        make_samples("sent_recall", letters, twins + " Short ones do not count here.", length=250, questions=1)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("needle", {}, "task='needle' does not exist: choose from mk_needle, sent_recall, copy_ids"),
        ("mk_needle", {"contexts": 0}, "must be at least 1"),
        ("mk_needle", {"questions": 0}, "must be at least 1"),
        ("mk_needle", {"questions": 99}, "questions=99 is not possible: mk_needle has 56 different keys"),
        ("mk_needle", {"length": 100}, "no room for any text"),
        ("mk_needle", {"length": 9000}, "the text has .* tokens of prose and a mk_needle context needs"),
        ("sent_recall", {"length": 9000}, "the text has .* tokens of prose and a sent_recall context needs 9000"),
        ("sent_recall", {"length": 500, "questions": 20}, "sentences of 18 words to quote, and questions=20"),
        ("copy_ids", {"length": 60, "questions": 2}, "a list of 7 identifiers, 60 tokens, can be asked at 0 places"),
    ],
    ids=str,
)
def test_impossible_numbers_are_refused(task, options, message, letters):
    with pytest.raises(ValueError, match=message):
        make_samples(task, letters, PROSE, **{"length": 1500} | options)


def test_only_prose_is_taken_and_each_sentence_once():
    text = """A heading without an end

    First comes a sentence over
    two lines of text. First comes a sentence over two lines of text.

        >>> print("Is this an example of some code?")

    rule ::= "a" | "grammar with more than six words."

    | a | table with more than six words | here. |

    Too short. Is this the second sentence of them?"""
    expected = ["First comes a sentence over two lines of text.", "Is this the second sentence of them?"]
    assert split_sentences(text) == expected


def test_the_default_text_has_enough_prose(letters):
    assert python_topics(["for"]) in python_topics()
    assert sum(map(len, split_sentences(python_topics()))) > 100_000


def test_texts_come_from_a_file_or_a_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, text in (("b.txt", "two"), ("a.md", "one"), ("sub/c.rst", "three"), ("d.py", "code")):
        (tmp_path / name).write_text(text)
    assert read_texts(tmp_path) == "one\n\ntwo\n\nthree"
    assert read_texts(tmp_path / "d.py") == "code"
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "missing"):
        with pytest.raises(ValueError, match=f"{path.name}' is neither a file nor a folder with .md, .rst, .txt files"):
            read_texts(path)
