"""The recall benchmark on tiny models: scores by hand, copies that do not meet, what each protocol lets a cache see."""

import json
import math
import statistics

import pytest
import torch
from transformers import DynamicCache

from hf_kvcache import make_cache
from hf_kvcache.bench.recall import ask_seen, ask_unseen, bench_recall, score_answer
from hf_kvcache.bench.recall_result import Score, estimate, summarize
from hf_kvcache.bench.recall_tasks import Question, Sample
from hf_kvcache.bench.texts import python_topics

INT2 = {"q_group_size": 16, "residual_length": 0, "num_sink_tokens": 0}
WINDOW = {"sliding_window": 8, "num_sink_tokens": 1}
CACHES = [
    ("llama", "blocks", {}),
    ("llama", "int2", INT2),
    ("llama", "sliding_window", WINDOW),
    ("gemma3", "blocks", {}),
    ("gemma3", "int4", INT2),
    ("falcon_h1", "blocks", {}),
]
PROSE = " ".join(
    f"Sentence {i} of this text begins in its own way and goes on with words up to {i}." for i in range(40)
)


def sharpen(model):
    """Larger keys make a sharper softmax, in which rounding and forgetting show."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight *= 40
            layer.self_attn.q_proj.weight *= 4
    return model


@pytest.fixture
def sample(make_ids):
    """A context of 90 tokens and three questions of unequal length, one with an answer of one token."""
    ids = make_ids(1, 130)[0].tolist()
    lengths = [(5, 4), (9, 1), (2, 7)]
    questions, begin = [], 90
    for text, answer in lengths:
        questions.append(Question(tuple(ids[begin : begin + text]), tuple(ids[begin + text : begin + text + answer])))
        begin += text + answer
    return Sample(tuple(ids[:90]), tuple(questions))


def alone(sample: Sample, index: int) -> Sample:
    return Sample(sample.context, (sample.questions[index],))


def assert_same(got: list[Score], expected: list[Score]) -> None:
    assert [(one.exact_match, one.tokens_right) for one in got] == [
        (one.exact_match, one.tokens_right) for one in expected
    ]
    assert [one.nll for one in got] == pytest.approx([one.nll for one in expected], rel=1e-4)


def test_a_score_by_hand():
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    score = score_answer(logits, Question((0,), (1, 2)), 7)
    expected = [math.log(1 + math.exp(2) + math.exp(1)) - 2, math.log(math.exp(3) + 2)]
    assert (score.exact_match, score.tokens_right, score.held_bytes) == (0.0, 0.5, 7)
    assert score.nll == pytest.approx(statistics.fmean(expected))
    assert score_answer(logits, Question((0,), (1, 0)), 7).exact_match == 1.0


@pytest.mark.core
@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon_h1"])
@pytest.mark.parametrize("ask", [ask_unseen, ask_seen])
@pytest.mark.parametrize("cache", ["dynamic", "blocks"])
@torch.no_grad()
def test_exact_caches_score_as_a_forward_without_a_cache(name, ask, cache, sample, tiny_model):
    model = tiny_model(name)
    build = (lambda: DynamicCache(config=model.config)) if cache == "dynamic" else (lambda: make_cache(model))
    expected = []
    for question in sample.questions:
        ids = torch.tensor([sample.context + question.text + question.answer])
        logits = model(ids, use_cache=False).logits[0, -len(question.answer) - 1 : -1]
        expected.append(score_answer(logits, question, 0))
    assert_same(ask(model, build, sample), expected)


@pytest.mark.parametrize("ask", [ask_unseen, ask_seen])
@torch.no_grad()
def test_sparse_reads_answer_token_by_token(ask, sample, tiny_model):
    """In longer forwards they read everything, and would answer as the full cache does."""
    model = sharpen(tiny_model("llama"))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight *= 10
    options = {"num_recent_tokens": 1, "num_sink_tokens": 0, "block_size": 4}
    nll = {}
    for ratio in (0.05, 1.0):
        scores = ask(model, lambda ratio=ratio: make_cache(model, "topk", keep_ratio=ratio, **options), sample)
        nll[ratio] = torch.tensor([score.nll for score in scores])
    exact = torch.tensor([score.nll for score in ask(model, lambda: make_cache(model), sample)])
    torch.testing.assert_close(nll[1.0], exact, rtol=1e-4, atol=0.0)
    # Of single answers: in their mean, what is better and what is worse cancel out.
    assert ((nll[0.05] - exact).abs() / exact).max() > 1e-2


@pytest.mark.parametrize("ask", [ask_unseen, ask_seen])
@torch.no_grad()
def test_what_greedy_decoding_writes_is_an_exact_match(ask, sample, tiny_model):
    model, context = tiny_model("llama"), sample.context
    questions = []
    for question in sample.questions:
        prompt = torch.tensor([context + question.text])
        written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)
        questions.append(Question(question.text, tuple(written[0, prompt.shape[1] :].tolist())))
    *first, last = questions[0].answer
    questions.append(Question(questions[0].text, (*first, last ^ 1)))
    scores = ask(model, lambda: make_cache(model), Sample(context, tuple(questions)))
    assert [score.exact_match for score in scores] == [1, 1, 1, 0]
    assert [score.tokens_right for score in scores] == pytest.approx([1, 1, 1, 5 / 6])


@pytest.mark.parametrize(("name", "cache", "options"), CACHES)
@torch.no_grad()
def test_questions_of_a_batch_do_not_meet(name, cache, options, sample, tiny_model):
    model = tiny_model(name)
    built = []

    def build():
        built.append(make_cache(model, cache, **options))
        return built[-1]

    together = ask_unseen(model, build, sample)
    assert built[0].get_seq_length() == len(sample.context)  # the questions went to copies
    assert len({round(score.nll, 4) for score in together}) == 3
    for index, score in enumerate(together):
        assert_same([score], ask_unseen(model, build, alone(sample, index)))


@torch.no_grad()
def test_a_question_is_only_seen_in_the_prompt(sample, tiny_model):
    """A prompt attends in full precision before it is encoded, so that seen answers of one token lose nothing."""
    model = sharpen(tiny_model("llama"))
    ask = alone(sample, 1)
    (full,) = ask_unseen(model, lambda: DynamicCache(config=model.config), ask)
    (unseen,) = ask_unseen(model, lambda: make_cache(model, "int2", **INT2), ask)
    (seen,) = ask_seen(model, lambda: make_cache(model, "int2", **INT2), ask)
    assert seen.nll == pytest.approx(full.nll, rel=1e-4)
    assert abs(unseen.nll - full.nll) > 1e-2


@torch.no_grad()
def test_a_cache_that_evicts_does_it_before_any_question(sample, tiny_model):
    model, built = sharpen(tiny_model("llama")), []

    def build():
        built.append(make_cache(model, "kvzip", budget=40))
        return built[-1]

    ask = alone(sample, 0)
    (compressed,) = ask_unseen(model, build, ask)
    (full,) = ask_unseen(model, lambda: DynamicCache(config=model.config), ask)
    assert sum(layer.stored_length for layer in built[0].layers) == 2 * 40
    assert compressed.held_bytes < full.held_bytes
    assert abs(compressed.nll - full.nll) > 1e-3


def test_rows_of_a_run(tiny_model, letters):
    model, lines = sharpen(tiny_model("llama")), []
    bench = bench_recall(
        model,
        letters,
        PROSE,
        caches=[("blocks", {}), ("int2", INT2)],
        tasks=["mk_needle", "copy_ids"],
        protocols=["unseen", "seen"],
        contexts=2,
        length=400,
        questions=2,
        progress=lines.append,
    )
    labels = ["full cache", "blocks", "int2 q_group_size=16 residual_length=0 num_sink_tokens=0"]
    assert [(row.task, row.protocol, row.cache) for row in bench.rows] == [
        (task, protocol, label)
        for task in ("mk_needle", "copy_ids")
        for protocol in ("unseen", "seen")
        for label in labels
    ]
    assert len(lines) == 2 * 2 * 2 * 3
    assert lines[1] == "mk_needle, unseen: context 1 of 2, blocks"
    for full, blocks, int2 in zip(bench.rows[::3], bench.rows[1::3], bench.rows[2::3], strict=True):
        assert (full.nll_difference.mean, full.held_ratio) == (0.0, 1.0)
        assert abs(blocks.nll_difference.mean) < 1e-4
        assert abs(int2.nll_difference.mean) > 1e-3
        assert int2.nll_difference.mean == pytest.approx(int2.nll.mean - full.nll.mean, abs=1e-6)
        assert int2.held_ratio == int2.held_bytes / full.held_bytes < 0.5
        assert full.held_bytes == pytest.approx(2 * 2 * 2 * 16 * 4 * 400, rel=0.5)
    assert json.loads(json.dumps(bench.to_dict()))["rows"][0]["exact_match"]["mean"] == bench.rows[0].exact_match.mean
    assert bench.table().row_count == 4 + 12
    assert list(bench.table().columns[0].cells)[:4] == ["[bold]mk_needle, unseen", *labels]


def test_differences_are_paired_and_contexts_are_the_independent_ones():
    def scores(*contexts):
        return [[Score(one, one / 2, -one, 100) for one in context] for context in contexts]

    full, ours = scores((1, 1), (1, 0), (0, 0)), scores((1, 0), (1, 0), (0, 0))
    row = summarize("copy_ids", "unseen", "ours", ours, full)
    assert (row.exact_match.mean, row.exact_match_difference.mean) == pytest.approx((1 / 3, -1 / 6))
    assert row.exact_match_difference.standard_error == pytest.approx(statistics.stdev([-0.5, 0, 0]) / math.sqrt(3))
    assert row.tokens_right_difference.mean == pytest.approx(-1 / 12)
    assert row.nll_difference.mean == pytest.approx(1 / 6)
    assert f"{row.exact_match_difference:+.2f}" == "-0.17 ± 0.17"
    assert f"{row.exact_match_difference.scaled(100):+.1f}" == "-16.7 ± 16.7"
    assert (row.held_bytes, row.held_ratio) == (100, 1)


def test_one_context_has_no_standard_error():
    assert estimate([0.5]).standard_error is None
    assert f"{estimate([0.5]).scaled(10):+.2f}" == "+5.00"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["needle"]}, r"tasks=\['needle'\] is not possible: choose from mk_needle, sent_recall, copy_ids"),
        ({"tasks": []}, r"tasks=\[\] is not possible"),
        ({"protocols": ["blind"]}, r"protocols=\['blind'\] is not possible: choose from unseen, seen"),
    ],
)
def test_unknown_names_are_refused(options, message, tiny_model, letters):
    with pytest.raises(ValueError, match=message):
        bench_recall(tiny_model("llama"), letters, PROSE, caches=[], **options)


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_finds_needles_until_they_are_forgotten(real_model):
    model, tokenizer = real_model("smollm2")
    quarter = {"keep_ratio": 0.25}
    caches = [("int8", {}), ("sliding_window", {"sliding_window": 64}), ("kvzip", quarter), ("random", quarter)]
    sizes = {"contexts": 2, "length": 600, "questions": 2}
    rows = bench_recall(model, tokenizer, python_topics(), caches=caches, **sizes).rows
    full, int8, window, kvzip, random = rows
    assert full.exact_match.mean == 1.0
    assert int8.exact_match_difference.mean == 0.0
    assert abs(int8.nll_difference.mean) < 0.01
    assert window.exact_match.mean == 0.0
    assert window.held_ratio < 0.25
    assert kvzip.exact_match.mean >= 0.75
    assert random.exact_match.mean == 0.0
    assert max(kvzip.held_ratio, random.held_ratio) < 0.35  # a quarter, groups of 16 and slots
