"""Tests of the toy language: distributions sum to one, texts can be parsed, and a more skilled
model is correct more often.
"""

import math
import re
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atts.core import Completion, Message, Problem, SampleRequest, Sampling, ScoreRequest, TokenIds
from atts.errors import OptionError, UsageError
from atts.sampling import Seed
from atts.testing import DRAFT, TARGET, Skill, ToyModel, ToyTokenizer, toy_model, toy_problems
from atts.testing.toy_model import Distribution, Writer, read_question

TOKENIZERS = {dialect: ToyTokenizer(dialect) for dialect in ("plain", "other")}
PLAIN = TOKENIZERS["plain"]
MODEL = ToyModel(DRAFT, PLAIN)
Vector = npt.NDArray[np.float64]
QUICK = settings(max_examples=60, deadline=None)
any_ids = st.lists(st.integers(0, PLAIN.vocabulary - 1), max_size=30).map(tuple)


def ask(problem: Problem, tokenizer: ToyTokenizer = PLAIN) -> TokenIds:
    """Render the problem as a user's message."""
    return tokenizer.render([Message("user", problem.text)])


def solve(writer: Writer, problem: Problem, sample: int = 0) -> Completion:
    """Write a whole solution."""
    ids = ask(problem, writer.model.tokenizer)
    return writer.write(SampleRequest(ids, 600, seed=Seed(problem=problem.id, sample=sample)))


def answer(text: str) -> str | None:
    """Return the content of the last box."""
    found = re.findall(r"\\boxed\{(\d+)\}", text)
    return found[-1] if found else None


# tests of the tokenizer


@QUICK
@given(
    st.text(max_size=60)
    | st.from_regex(r"(So| we|: 17| plus|\.|\n|,| 8|\\boxed\{){0,20}", fullmatch=True)
)
def test_any_text_goes_to_ids_and_back(text: str) -> None:
    """Encoding and then decoding returns the original text, in any script and in both toy languages."""
    for tokenizer in TOKENIZERS.values():
        assert tokenizer.decode(tokenizer.encode(text)) == text


@QUICK
@given(any_ids, any_ids)
def test_decoding_is_concatenation(left: TokenIds, right: TokenIds) -> None:
    """Decoding two id sequences together gives their two texts joined, unless a character was cut
    in between.
    """
    whole = PLAIN.decode(left + right)
    parts = PLAIN.decode(left) + PLAIN.decode(right)
    assert whole == parts or "\ufffd" in parts


def test_the_vocabulary_has_the_traps_of_real_ones() -> None:
    """The vocabulary has words of several characters, blank lines across tokens, and a text that
    several token sequences spell.
    """
    assert PLAIN.piece_id(" minus") is not None
    assert PLAIN.piece_id(".\n") is not None
    assert PLAIN.piece_id("\nSo") is not None
    several = [
        PLAIN.encode(".\n\n"),
        PLAIN.encode(".\n") + PLAIN.encode("\n"),
        PLAIN.encode(".") + PLAIN.encode("\n\n"),
    ]
    assert len(set(several)) == 3
    assert {PLAIN.decode(ids) for ids in several} == {".\n\n"}


def test_special_tokens_are_neither_text_nor_made_of_text() -> None:
    """The spelling of a special token is encoded as its bytes, and decoding leaves out real special
    tokens.
    """
    assert PLAIN.end_id not in PLAIN.encode("<|end|>")
    assert PLAIN.decode((PLAIN.end_id, *PLAIN.encode("So"), PLAIN.end_id)) == "So"
    with pytest.raises(UsageError, match="another tokenizer"):
        PLAIN.decode((PLAIN.vocabulary,))


def test_the_template_opens_the_assistants_turn_once() -> None:
    """Roles are marked, and an unfinished assistant message stays open."""
    messages = [Message("system", "Be brief."), Message("user", "So?")]
    ids = PLAIN.render(messages)
    assert ids[0] == 1
    assert ids[-1] == 3
    assert PLAIN.decode(ids) == "Be brief.So?"
    assert PLAIN.render([*messages, Message("assistant", "Now")]) == ids + PLAIN.encode("Now")


def test_dialects_have_different_digests() -> None:
    """Two tokenizers of one toy dialect have equal digests, tokenizers of different dialects do
    not, and an unknown dialect is an error.
    """
    assert PLAIN.digest == ToyTokenizer().digest != TOKENIZERS["other"].digest
    assert PLAIN.encode("So we") != TOKENIZERS["other"].encode("So we")
    with pytest.raises(OptionError, match="known: plain, other"):
        ToyTokenizer("plane")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# tests of distributions

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, 12]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)
weights = st.dictionaries(
    st.integers(0, 11), st.integers(1, 1000).map(lambda n: n / 100), min_size=1, max_size=6
)
# weights are multiples of 0.01, so two weights are equal or differ by more than rounding


def dense(distribution: Distribution, size: int = 12) -> Vector:
    """Return all probabilities of a distribution."""
    return np.array([math.exp(distribution.logprob(index)) for index in range(size)])


def filtered(raw: Vector, sampling: Sampling) -> Vector:
    """Apply temperature, top-k, top-p and min-p in the simplest way; ties go to the lower id."""
    order = np.lexsort((np.arange(len(raw)), -raw.round(13)))
    if sampling.temperature == 0:
        return np.asarray(np.eye(len(raw))[order[0]])
    probs = raw ** (1 / sampling.temperature)
    kept = np.zeros(len(raw), dtype=bool)
    kept[order[: sampling.top_k or None]] = True
    probs = np.where(kept, probs, 0) / probs[kept].sum()
    reached = np.cumsum(probs[order]) - probs[order]
    kept[order[reached >= sampling.top_p - 1e-12]] = sampling.top_p >= 1
    kept[order[0]] = True
    kept &= probs >= sampling.min_p * probs.max() * (1 - 1e-12)
    return np.asarray(np.where(kept, probs, 0) / probs[kept].sum())


@QUICK
@given(weights, samplings)
def test_sparse_filtering_equals_dense_filtering(
    table: dict[int, float], sampling: Sampling
) -> None:
    """A distribution that is filtered in sparse form equals the dense distribution filtered step by
    step, and sums to one.
    """
    distribution = Distribution.of(table, 12, 1e-3)
    assert dense(distribution).sum() == pytest.approx(1)
    assert dense(distribution.under(sampling)) == pytest.approx(
        filtered(dense(distribution), sampling), abs=1e-9
    )


@QUICK
@given(weights, samplings)
def test_drawing_is_the_inverse_distribution(table: dict[int, float], sampling: Sampling) -> None:
    """A fine grid of uniform numbers draws each token as often as its probability says, even rare
    tokens.
    """
    distribution = Distribution.of(table, 12, 0.05).under(sampling)
    grid = 4000
    drawn = Counter(distribution.draw((n + 0.5) / grid) for n in range(grid))
    expected = dense(distribution)
    assert all(abs(drawn[index] / grid - expected[index]) <= 2 / grid for index in range(12))
    assert sum(drawn.values()) == grid


@QUICK
@given(st.integers(0, 50), any_ids.filter(bool))
def test_every_prefix_has_a_distribution(problem: int, ids: TokenIds) -> None:
    """The next token's probabilities are positive and sum to one after any text."""
    for prefix in (ids, ask(toy_problems(51)[problem]) + ids):
        distribution = MODEL.distribution(MODEL.read(prefix))
        assert math.fsum(dense(distribution, PLAIN.vocabulary)) == pytest.approx(1)
        assert dense(distribution, PLAIN.vocabulary).min() > 0


@QUICK
@given(st.integers(0, 50), any_ids, st.integers(0, 30))
def test_the_distribution_is_a_function_of_the_prefix(
    problem: int, ids: TokenIds, cut: int
) -> None:
    """The distribution is the same if the prefix is read at once, in two parts, by another model
    with equal settings, or after other work.
    """
    prefix = ask(toy_problems(51)[problem]) + ids
    place = min(cut, len(prefix) - 1) or 1
    whole = dense(MODEL.distribution(MODEL.read(prefix)), PLAIN.vocabulary)
    fresh = ToyModel(DRAFT, ToyTokenizer())
    assert (
        dense(
            MODEL.distribution(MODEL.read(prefix[place:], MODEL.read(prefix[:place]))),
            PLAIN.vocabulary,
        )
        == whole
    ).all()
    assert (dense(fresh.distribution(fresh.read(prefix)), PLAIN.vocabulary) == whole).all()


@QUICK
@given(
    st.integers(0, 20),
    st.integers(0, 5),
    st.integers(1, 40),
    st.sampled_from([Sampling(), Sampling(0.8, 5)]),
)
def test_scores_are_the_log_probs_of_sampling(
    problem: int, sample: int, cut: int, sampling: Sampling
) -> None:
    """Scores and sampled log-probabilities are exactly equal with a warm or cold cache, and for a
    whole text or parts of it.
    """
    ids = ask(toy_problems(21)[problem])
    warm = Writer(MODEL)
    done = warm.write(SampleRequest(ids, 60, sampling, Seed(sample=sample)))
    for writer in (warm, Writer(MODEL, memory=1)):
        assert writer.score(ScoreRequest(ids, done.ids)) == done.logprobs
        head = done.ids[:cut]
        rest = done.ids[cut:]
        if rest:
            assert writer.score(ScoreRequest(ids + head, rest)) == done.logprobs[cut:]


# tests of problems and texts


def test_distributions_that_were_forgotten_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with room for three distributions writes the same as one with room for all."""
    found = toy_problems(5, 1)
    whole = [solve(Writer(ToyModel(DRAFT, PLAIN)), problem) for problem in found]
    monkeypatch.setattr(toy_model, "_DISTRIBUTIONS_KEPT", 3)
    small = ToyModel(DRAFT, PLAIN)
    assert [solve(Writer(small), problem) for problem in found] == whole
    assert len(small._known) == 3  # pyright: ignore[reportPrivateUsage]


def test_problems_are_seeded_and_their_answers_correct() -> None:
    """The same seed gives the same problems, another seed gives others, and each answer is the sum
    computed in the problem.
    """
    problems = toy_problems(200, seed=4)
    assert problems == toy_problems(200, seed=4)
    assert problems[:50] == toy_problems(50, seed=4)
    assert not {p.text for p in problems} <= {p.text for p in toy_problems(200, seed=5)}
    assert len({p.text for p in problems}) == len({p.id for p in problems}) == 200
    for problem in problems:
        start, *steps = (int(value) for value in re.findall(r"[+-]?\d+", problem.text))
        assert problem.answer == str(start + sum(steps))
        assert problem.level in range(1, 6)


def test_the_question_is_found_inside_a_pipelines_prompt() -> None:
    """The model finds the question although a pipeline's prompt has instructions around it."""
    problem = toy_problems(1)[0]
    plain = read_question(problem.text)
    wrapped = read_question(
        f"Solve step by step and use \\boxed{{}}.\n\nQuestion: {problem.text}\nAnswer:"
    )
    assert (wrapped.truth, wrapped.hardness, wrapped.mood) == (
        plain.truth,
        plain.hardness,
        plain.mood,
    )
    assert str(plain.truth[-1]) == problem.answer


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_perfect_model_is_correct_in_both_dialects(tokenizer: ToyTokenizer) -> None:
    """Without mistakes, at least 57 of 60 texts end with the correct box; rare leaked tokens spoil
    the others.
    """
    writer = Writer(ToyModel(Skill(right=1.0, wander=0.0, repair=1.0), tokenizer))
    tries = [(problem, solve(writer, problem)) for problem in toy_problems(60)]
    assert (
        sum(done.ended == "end" and answer(done.text) == problem.answer for problem, done in tries)
        >= 57
    )


def share_right(skill: Skill, samples: int = 3) -> float:
    """Return the accuracy of single solutions."""
    writer = Writer(ToyModel(skill, PLAIN))
    tries = [
        (p, solve(writer, p, sample)) for p in toy_problems(80, seed=3) for sample in range(samples)
    ]
    return sum(answer(done.text) == p.answer for p, done in tries) / len(tries)


def test_skill_shows_in_answers() -> None:
    """The target is nearly always correct and the draft often wrong. A draft that repairs its
    mistakes is correct more often than one that does not.
    """
    draft = share_right(DRAFT)
    target = share_right(TARGET)
    assert 0.25 < draft < 0.65
    assert target > 0.95
    assert share_right(Skill(repair=0.9)) > draft + 0.1


def test_a_target_that_takes_over_repairs() -> None:
    """After a mistake of the draft, the target's continuation is correct far more often than the
    draft's own.
    """
    right = {"draft": 0, "target": 0}
    writers = {"draft": Writer(MODEL), "target": Writer(ToyModel(TARGET, PLAIN))}
    for problem in toy_problems(60, seed=8):
        reader = MODEL.read(ask(problem))
        wrong = (reader.question.truth[1] + 1) % 100
        sign = " plus" if reader.operation > 0 else " minus"
        ids = ask(problem) + PLAIN.encode(
            f"So: {reader.value}{sign} {abs(reader.operation)} is {wrong}.\n\n"
        )
        for name, writer in writers.items():
            done = writer.write(SampleRequest(ids, 600, seed=Seed(problem=problem.id)))
            right[name] += answer(done.text) == problem.answer
    assert right["target"] > 0.85 * 60
    assert right["draft"] < 0.35 * 60


def step_scores(
    target: Skill, draft: Skill = DRAFT, tokens: int = 40
) -> list[tuple[str, float, bool]]:
    """Return (problem, the target's mean surprise in nats, whether the draft made a mistake) for
    every first chunk.
    """
    author = Writer(ToyModel(draft, PLAIN))
    scorer = Writer(ToyModel(target, PLAIN))
    found: list[tuple[str, float, bool]] = []
    for problem in toy_problems(50, seed=2):
        for sample in range(6):
            ids = ask(problem)
            done = author.write(
                SampleRequest(ids, tokens, seed=Seed(problem=problem.id, sample=sample))
            )
            after = MODEL.read(ids + done.ids)
            surprise = -math.fsum(scorer.score(ScoreRequest(ids, done.ids))) / len(done.ids)
            found.append((problem.id, surprise, after.value != after.truth))
    return found


def separation(scores: list[tuple[str, float, bool]]) -> float:
    """Return the probability that a chunk with a mistake scores worse than a correct one."""
    slipped = [score for _, score, bad in scores if bad]
    sound = [score for _, score, bad in scores if not bad]
    return float(np.mean([[s > t for t in sound] for s in slipped]))


def test_slips_raise_the_targets_perplexity_by_a_margin_one_can_set() -> None:
    """Scores separate chunks with a mistake from correct ones better with a more certain target,
    and worse if texts have filler words.
    """
    plain = separation(step_scores(TARGET))
    sure = separation(step_scores(Skill(right=0.9995, typical=0.05, fluency=1.0)))
    drowned = separation(
        step_scores(
            Skill(right=0.97, typical=0.95, verbosity=9, fluency=1.0), Skill(verbosity=9), tokens=80
        )
    )
    assert 0.55 < drowned < plain < sure


def test_scores_cluster_by_question() -> None:
    """Between a third and four fifths of the variance of scores is between questions, as in real
    traces.
    """
    scores = step_scores(TARGET, tokens=60)
    by_question: dict[str, list[float]] = {}
    for problem, score, _ in scores:
        by_question.setdefault(problem, []).append(math.log(score))
    table = np.array(list(by_question.values()))
    size = table.shape[1]
    between = size * table.mean(1).var(ddof=1)
    within = table.var(1, ddof=1).mean()
    assert 0.33 < (between - within) / (between + (size - 1) * within) < 0.8


def test_steps_vary_in_length_and_end_with_blank_lines_across_tokens() -> None:
    """Chunk lengths vary, and some blank lines are completed by a token that already begins the
    next step.
    """
    lengths: list[int] = []
    crossing = 0
    writer = Writer(MODEL)
    for problem in toy_problems(60):
        done = writer.write(
            SampleRequest(ask(problem), 200, seed=Seed(problem=problem.id), stop=("\n\n",))
        )
        lengths.append(len(done.ids))
        crossing += done.ended == "delimiter" and not done.text.endswith("\n\n")
        assert done.ended != "delimiter" or "\n\n" in done.text
    assert np.std(lengths) > 3
    assert crossing > 0
