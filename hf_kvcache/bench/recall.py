"""Recall: how much of what stood in the context a cache can still answer, beside the full cache on the same samples.

Perplexity is about likely words and hides what is forgotten; an answer that stands once in the context does not.

- **unseen**: the context is run into the cache, which compresses it if it does that, before any question is known. Each
  question is asked on a copy.
- **seen**: context and question are one prompt of `model.generate()`, so that a cache that looks at the last queries
  sees the question. The first answer token is the prompt's own output, as it is for a user.

The answer is forced. It is an exact match if every one of its tokens is the most likely one, which is what greedy
decoding would have written. Caches that read sparsely are given questions and answers a token at a time.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from ..build import make_cache
from ..cache import KVCache
from ..compat import CACHE_ARG
from ..report import measure
from .forced import forced_logits
from .labels import cache_label, model_label
from .recall_result import RecallBench, RecallRow, Score, summarize
from .recall_tasks import TASKS, Question, Sample, make_samples

FULL = "full cache"


@torch.no_grad()
def bench_recall(
    model: PreTrainedModel,
    tokenizer: Any,
    text: str,
    *,
    caches: Sequence[tuple[str, dict[str, Any]]],
    tasks: Sequence[str] = ("mk_needle",),
    protocols: Sequence[str] = ("unseen",),
    contexts: int = 8,
    length: int = 1600,
    questions: int = 4,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> RecallBench:
    """Measure `caches`, pairs of a name and its options, and a DynamicCache on identical samples.

    Args:
        model: where the caches are used.
        tokenizer: the model's.
        text: prose for the contexts.
        caches: what to measure.
        tasks: of `"mk_needle"`, `"sent_recall"`, `"copy_ids"`.
        protocols: of `"unseen"`, `"seen"`. The second runs the context once a question.
        contexts: contexts a task.
        length: tokens a context, at most.
        questions: questions a context.
        seed: of the samples.
        progress: called with a line of text before each context.

    Raises:
        ValueError: for an unknown task or protocol, or a text that is too short.
    """
    check_choices(tasks, protocols)
    builders: dict[str, Callable[[], Cache]] = {
        FULL: lambda: DynamicCache(config=model.config.get_text_config(decoder=True))
    }
    for name, options in caches:
        builders[cache_label(name, options)] = functools.partial(make_cache, model, name, **options)
    draw = functools.partial(make_samples, contexts=contexts, length=length, questions=questions, seed=seed)
    drawn = {task: draw(task, tokenizer, text) for task in tasks}
    rows = [
        row
        for task, samples in drawn.items()
        for protocol in protocols
        for row in _measure(model, builders, task, protocol, samples, progress)
    ]
    return RecallBench(
        model=model_label(model),
        dtype=str(model.dtype).removeprefix("torch."),
        contexts=contexts,
        length=length,
        questions=questions,
        seed=seed,
        rows=tuple(rows),
    )


def check_choices(tasks: Sequence[str], protocols: Sequence[str]) -> None:
    """Refuse unknown and missing names.

    Raises:
        ValueError: with the names there are.
    """
    for kind, given, known in (("tasks", tasks, TASKS), ("protocols", protocols, PROTOCOLS)):
        if not given or not set(given) <= set(known):
            raise ValueError(f"{kind}={list(given)} is not possible: choose from {', '.join(known)}.")


def _measure(
    model: PreTrainedModel,
    builders: dict[str, Callable[[], Cache]],
    task: str,
    protocol: str,
    samples: list[Sample],
    progress: Callable[[str], None] | None,
) -> list[RecallRow]:
    """A row for each cache, the full one first. All of them answer about one context before the next one begins."""
    scores: dict[str, list[list[Score]]] = {label: [] for label in builders}
    for index, sample in enumerate(samples):
        for label, build in builders.items():
            if progress:
                progress(f"{task}, {protocol}: context {index + 1} of {len(samples)}, {label}")
            scores[label].append(PROTOCOLS[protocol](model, build, sample))
    return [summarize(task, protocol, label, scores[label], scores[FULL]) for label in builders]


def ask_unseen(model: PreTrainedModel, build: Callable[[], Cache], sample: Sample) -> list[Score]:
    """One score a question: the cache is filled with the context, and the questions are asked on copies of it."""
    cache = build()
    context = torch.tensor([sample.context], device=model.device)
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    model(context, use_cache=True, **{CACHE_ARG: cache}, **last)
    if isinstance(cache, KVCache) and cache.evicts:
        cache.compress(context)
    held = measure(cache)
    # transformers' caches cannot all repeat a sequence: those are asked one question after the other.
    batches = [sample.questions] if isinstance(cache, KVCache) else [(question,) for question in sample.questions]
    return [score for batch in batches for score in _ask(model, cache, batch, held)]


def _ask(model: PreTrainedModel, cache: Cache, questions: Sequence[Question], held: int) -> list[Score]:
    """Scores of questions asked on a copy of `cache`, as one batch.

    Shorter rows are padded at their end. No token before can see that, so it changes nothing.
    """
    copies = cache.fork() if isinstance(cache, KVCache) else copy.deepcopy(cache)
    if len(questions) > 1:
        copies.batch_repeat_interleave(len(questions))
    rows = [torch.tensor(question.text + question.answer[:-1]) for question in questions]
    logits = forced_logits(model, copies, pad_sequence(rows, batch_first=True).to(model.device))
    return [
        score_answer(row[len(question.text) - 1 : len(question.text) - 1 + len(question.answer)], question, held)
        for row, question in zip(logits, questions, strict=True)
    ]


def ask_seen(model: PreTrainedModel, build: Callable[[], Cache], sample: Sample) -> list[Score]:
    """One score a question: `generate()` runs context and question into a new cache, and the answer is forced on it."""
    scores = []
    for question in sample.questions:
        cache = build()
        prompt = torch.tensor([sample.context + question.text], device=model.device)
        first = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=1,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **{CACHE_ARG: cache},
        )
        held, logits = measure(cache), [first.logits[0]]
        if len(question.answer) > 1:
            forced = torch.tensor([question.answer[:-1]], device=model.device)
            logits.append(forced_logits(model, cache, forced)[0])
        scores.append(score_answer(torch.cat(logits), question, held))
    return scores


PROTOCOLS: dict[str, Callable[..., list[Score]]] = {"unseen": ask_unseen, "seen": ask_seen}


def score_answer(logits: torch.Tensor, question: Question, held_bytes: int) -> Score:
    """Compare logits `[T, vocabulary]`, which predict the answer's `T` tokens, with the answer."""
    answer = torch.tensor(question.answer, device=logits.device)
    right = logits.argmax(-1) == answer
    return Score(
        exact_match=float(right.all()),
        tokens_right=right.float().mean().item(),
        nll=torch.nn.functional.cross_entropy(logits.float(), answer).item(),
        held_bytes=held_bytes,
    )
