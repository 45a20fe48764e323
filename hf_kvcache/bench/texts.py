"""Where benchmarks take their text from: the topics of Python's own documentation, or the user's files."""

import re
from collections.abc import Sequence
from pathlib import Path

SUFFIXES = (".md", ".rst", ".txt")
MIN_WORDS, MAX_WORDS = 6, 80  # of a sentence: shorter ones are headings, longer ones tables and code
_NOT_PROSE = ("::=", ">>>", " | ")  # grammars, examples, tables


def python_topics(names: Sequence[str] | None = None) -> str:
    """English prose that every Python ships (PSF licence): the language topics `names`, or all of them.

    The text differs a little between Python versions.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in (sorted(topics) if names is None else names))


def read_texts(path: Path) -> str:
    """The text of a file, or of all `.md`, `.rst` and `.txt` files under a folder in the order of their paths.

    Raises:
        ValueError: if there is no such file, or no text in the folder.
    """
    if path.is_file():
        return path.read_text(encoding="utf-8")
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise ValueError(f"{str(path)!r} is neither a file nor a folder with {', '.join(SUFFIXES)} files: give one.")
    return "\n\n".join(file.read_text(encoding="utf-8") for file in files)


def split_sentences(text: str) -> list[str]:
    """The sentences of `text`, each once and on one line. Headings, grammars and code are left out."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    sentences = (one for paragraph in paragraphs for one in re.split(r"(?<=[.!?]) ", paragraph))
    return list(dict.fromkeys(one for one in sentences if _is_prose(one)))


def _is_prose(sentence: str) -> bool:
    is_ended = sentence.endswith((".", "!", "?")) and not any(mark in sentence for mark in _NOT_PROSE)
    return is_ended and MIN_WORDS <= len(sentence.split()) <= MAX_WORDS
