"""Tests of score rules: a rule with skill finds planted mistakes, and a rule without skill finds
none.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, get_args

import pytest

from atts.api import Setup, evaluate
from atts.core import Chunk, Completion, Outcome, Sampling, ScoreRequest, Scores
from atts.engine import Capability, Engine, EngineAround, EngineSpec
from atts.errors import OptionError, UnsupportedByEngine
from atts.evaluators import compare_runs
from atts.pipelines import Gate, Policy, ScoreRule, check_engines
from atts.pipelines.gates import NonLearningGate
from atts.pipelines.judging import rating_score, verdict_score
from atts.pipelines.scores import ScoreKind, score_of, source_of
from atts.run import RunResult
from atts.testing import ScriptedEngine, Selector, run_virtual, toy_problems

Solve = Callable[..., list[Outcome]]
OF_CHUNKS = tuple(
    kind for kind in get_args(ScoreKind) if kind not in ("disagreement", "prm", "learned")
)
STEP = re.compile(r"(\d+) (plus|minus) (\d+) (?:is|gives|makes|was) (\d+)")


def is_right(step: str) -> bool | None:
    """Return whether a step's sum is correct, or None if the step has no sum."""
    match = STEP.search(step)
    if match is None:
        return None
    first, second, result = int(match[1]), int(match[3]), int(match[4])
    return first + second == result if match[2] == "plus" else first - second == result


class Grader(EngineAround):
    """A target that answers whether the last step is correct. A share `errors` of its answers is
    wrong.
    """

    def __init__(self, errors: float) -> None:
        super().__init__(ScriptedEngine("target"), "own")
        self._errors = errors

    async def around(self, request: Any, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """Answer a question by the truth; pass on any other request."""
        if not isinstance(request, ScoreRequest) or request.draw is not None:
            return await call(request)
        text = self.tokenizer.decode(request.prefix)
        question = max(text.rfind("\n\nIs the last"), text.rfind("\n\nI think the quality"))
        if question < 0:
            return await call(request)
        before = text[:question].rstrip().split("\n\n")[-1]
        truth = is_right(before) is not False
        if random.Random(before).random() < self._errors:
            truth = not truth
        word = self.tokenizer.decode(request.suffix)
        says_good = word == "Yes" or (word.isdigit() and int(word) >= 5)
        first = math.log(0.9 if says_good == truth else 0.1)
        return Scores((first, *([0.0] * (len(request.suffix) - 1))))


class Wavering(EngineAround):
    """A draft with high entropies at wrong steps and low entropies at correct ones. For a share
    `errors` of the steps this is exchanged.
    """

    def __init__(self, errors: float) -> None:
        super().__init__(ScriptedEngine("draft"), "own")
        self._errors = errors

    async def around(self, request: Any, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """Return planted entropies; pass on any other request."""
        if not isinstance(request, ScoreRequest) or not request.entropies:
            return await call(request)
        text = self.tokenizer.decode(request.suffix)
        is_wrong = is_right(text) is False
        if random.Random(text).random() < self._errors:
            is_wrong = not is_wrong
        return Scores((-2.0 if is_wrong else -0.5,) * len(request.suffix))


class Scoring(NonLearningGate):
    """A gate that requests a score for every chunk and accepts it."""

    def decide(self, features: Any, score: float) -> Any:
        """Accept the chunk with its score."""
        return features.decision("accept", score=score)


def auroc(
    kind: ScoreKind,
    attempt: Solve,
    errors: float = 0.0,
    target: Engine | None = None,
    draft: Engine | None = None,
) -> float:
    """Return the probability that a wrong step scores worse than a correct one."""
    policy = Policy(samples=4, score=ScoreRule(kind), early_stop="none")
    outcomes = attempt(
        policy, Scoring(), problems=40, draft=draft, target=target or Grader(errors), seed=1
    )
    wrong: list[float] = []
    right: list[float] = []
    for outcome in outcomes:
        for rollout in outcome.rollouts:
            for turn in rollout.turns:
                truth = is_right(turn.chunks[0].text)
                if truth is not None and turn.score is not None:
                    (right if truth else wrong).append(turn.score)
    assert min(len(wrong), len(right)) > 30
    wins = sum((bad > good) + 0.5 * (bad == good) for bad in wrong for good in right)
    return wins / (len(wrong) * len(right))


@pytest.mark.parametrize("kind", OF_CHUNKS)
def test_a_score_with_skill_finds_planted_mistakes(kind: ScoreKind, attempt: Solve) -> None:
    """A score with skill finds planted mistakes.

    The toy target knows the correct sums, and the toy draft is less certain where it makes
    mistakes.
    """
    draft = Wavering(0.0) if source_of(ScoreRule(kind)) == "entropy" else None
    assert auroc(kind, attempt, draft=draft) > (0.6 if kind == "draft" else 0.7)


@pytest.mark.parametrize("kind", ["rating", "verdict"])
def test_a_target_that_answers_at_random_finds_nothing(kind: ScoreKind, attempt: Solve) -> None:
    """If half of the target's answers about steps are wrong, the AUROC is about 0.5, as with a
    coin.
    """
    assert 0.4 < auroc(kind, attempt, errors=0.5) < 0.6


@pytest.mark.parametrize("kind", ["entropy", "entropy-worst"])
def test_entropies_without_skill_find_nothing(kind: ScoreKind, attempt: Solve) -> None:
    """If the draft is uncertain at random steps, the AUROC of its entropies is about 0.5. The
    target scores nothing.
    """
    assert 0.4 < auroc(kind, attempt, draft=Wavering(0.5)) < 0.6


@pytest.mark.parametrize("kind", ["entropy", "entropy-worst"])
def test_entropies_need_a_draft_that_shows_its_distributions(kind: ScoreKind) -> None:
    """Entropies are refused before any request if the draft shows no distributions, and the message
    says what to use instead.
    """
    hidden = frozenset[Capability]({"sample", "score"})
    setup = Setup(
        ScriptedEngine("draft", capabilities=hidden),
        "scripted",
        policy=Policy(score=ScoreRule(kind)),
    )
    with pytest.raises(
        UnsupportedByEngine, match=f"which score kind {kind} needs.*score.kind draft"
    ):
        run_virtual(partial(evaluate, toy_problems(1, 5), setup))


def mute(judge: float = 0.8) -> ScriptedEngine:
    """Return a target that writes text and reports nothing else, as hosted models do."""
    writes: frozenset[Capability] = frozenset({"sample"})
    return ScriptedEngine("target", capabilities=writes, selector=Selector(judge=judge))


@pytest.mark.parametrize("kind", ["rating", "verdict", "continuation"])
def test_a_target_without_log_probabilities_is_asked_in_text(
    kind: ScoreKind, attempt: Solve
) -> None:
    """A target without log-probabilities judges chunks by replies in text. Skilled replies have an
    AUROC above 0.7, and random replies one of about 0.5.
    """
    assert auroc(kind, attempt, target=mute()) > 0.7
    if kind != "continuation":
        assert 0.4 < auroc(kind, attempt, target=mute(judge=0.5)) < 0.6


@pytest.mark.parametrize("kind", ["rating", "verdict", "continuation"])
def test_scores_without_log_probabilities_beat_a_coin_at_equal_rate(kind: ScoreKind) -> None:
    """In whole runs, scores without log-probabilities meet the nominal rate. More single rollouts
    are correct than with a coin at the same rate.
    """

    def run(method: str, score: ScoreKind) -> RunResult:
        policy = Policy(samples=4, early_stop="none", score=ScoreRule(score))
        setup = Setup("scripted", mute(), method=method, policy=policy)
        return run_virtual(partial(evaluate, toy_problems(40, 5), setup))

    found = run("atts", kind)
    coin = run("coin", "mean")
    assert abs(found.rate.value - coin.rate.value) < 0.03
    assert found.unscored == 0
    difference = compare_runs(_shares(coin), _shares(found)).difference
    assert difference.low > 0
    # the target's replies to questions are discarded, but count as written by the target
    assert found.usage.target_tokens > coin.usage.target_tokens
    assert found.usage.wasted_tokens > coin.usage.wasted_tokens
    assert found.usage.scored_tokens == 0


def _shares(result: RunResult) -> list[float]:
    """Return the share of correct rollouts of each problem."""
    return [
        sum(one.verdict == "correct" for one in problem.samples) / len(problem.samples)
        for problem in result.problems
    ]


class Silent(EngineAround):
    """A hosted target that answers no question about a chunk, but writes "Hmm" instead."""

    async def around(self, request: Any, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """Return other words if the request is a question."""
        if request.max_tokens <= 4:
            ids = self.tokenizer.encode("Hmm")
            return Completion(ids, "Hmm", "length", (0.0,) * len(ids))
        return await call(request)


def test_a_question_without_an_answer_escalates(attempt: Solve) -> None:
    """A reply without an expected word gives no score, and the decision has the reason."""
    policy = Policy(samples=2, score=ScoreRule("verdict"), early_stop="none")
    outcomes = attempt(policy, Scoring(), problems=2, target=Silent(mute(), "own"))
    turns = [turn for one in outcomes for line in one.rollouts for turn in line.turns]
    judged = [turn for turn in turns if turn.decision is not None]
    assert judged
    for turn in judged:
        assert turn.decision is not None
        assert turn.decision.origin == "forced"
        assert "contains an expected word" in turn.note


def test_every_score_is_at_least_one_and_worse_is_higher() -> None:
    """Every score is at least 1 and higher is worse, as calibrators and reports require."""
    assert rating_score([[-50.0] * 9 + [0.0]]) == pytest.approx(1.0)
    assert rating_score([[0.0] + [-50.0] * 9]) == pytest.approx(10.0)
    assert verdict_score([[0.0, -50.0], [0.0, -50.0]]) == pytest.approx(1.0)
    assert verdict_score([[-1.0, -1.0], [-1.0, -1.0]]) == pytest.approx(2.0)
    assert verdict_score([[-800.0, 0.0], [-800.0, 0.0]]) == math.inf
    assert ScoreRule("worst")([-0.5, -2.0], "ab") == pytest.approx(math.exp(2))
    assert math.isnan(ScoreRule("worst")([-1.0, math.nan], "ab"))


def test_a_preference_for_the_first_word_gives_the_neutral_score() -> None:
    """A model that always takes the first word offered has the score 2, as a coin would."""
    always_first = [[-0.1, -5.0], [-5.0, -0.1]]
    assert verdict_score(always_first) == pytest.approx(2.0)


def test_expected_words_of_probability_zero_give_nan() -> None:
    """If both expected words have probability zero the score is NaN, which no gate accepts as a
    score.
    """
    assert math.isnan(verdict_score([[-math.inf, -math.inf], [-1.0, -1.0]]))
    assert math.isnan(rating_score([[-math.inf] * 10]))


def test_the_drafts_own_score_asks_the_target_nothing(attempt: Solve) -> None:
    """With the draft's own score the target neither scores nor reads a token."""
    policy = Policy(samples=4, score=ScoreRule("draft"), early_stop="none")
    outcomes = attempt(policy, Scoring(), problems=4)
    assert all(outcome.usage.scored_tokens == 0 for outcome in outcomes)
    scores = [t.score for o in outcomes for r in o.rollouts for t in r.turns]
    assert all(score is not None and score >= 1 for score in scores if score is not None)
    assert any(scores)


def spec(*, scores: bool, logprobs: bool) -> EngineSpec:
    """Make the spec of an engine that may be able to score texts and return log-probabilities."""
    able: set[Capability] = {"sample", "score"} if scores else {"sample"}
    return EngineSpec(
        "any",
        "any",
        tokenizer="t",
        context_length=100,
        end_ids=(0,),
        vocabulary=10,
        logprobs="raw" if logprobs else "none",
        capabilities=frozenset(able),
    )


def test_engines_are_checked_for_what_a_score_needs() -> None:
    """A run is refused before it begins if an engine cannot give what the score rule needs, such as
    log-probabilities or scores of texts.
    """
    writer = spec(scores=False, logprobs=False)
    plain = spec(scores=False, logprobs=True)
    gate: Gate = Scoring()
    check_engines(Policy(score=ScoreRule("draft")), gate, plain, writer)
    problems = Policy(score=ScoreRule("disagreement"), escalates="problem")
    check_engines(problems, gate, writer, writer)
    with pytest.raises(UnsupportedByEngine, match="no log-probabilities"):
        check_engines(Policy(score=ScoreRule("draft")), gate, writer, writer)
    for kind in ("mean", "worst", "speculative"):
        with pytest.raises(UnsupportedByEngine, match="cannot score"):
            check_engines(Policy(score=ScoreRule(kind)), gate, plain, plain)
    in_text: tuple[ScoreKind, ...] = ("verdict", "rating", "continuation")
    for asked in in_text:
        check_engines(Policy(score=ScoreRule(asked)), gate, writer, writer)


def test_votes_score_problems_and_nothing_else() -> None:
    """A policy that escalates whole problems needs the score "disagreement", and this score needs
    such a policy. One without the other is refused.
    """
    with pytest.raises(OptionError, match=r"score.*disagreement"):
        Policy(score=ScoreRule("disagreement"))
    with pytest.raises(OptionError, match=r"score.*disagreement"):
        Policy(escalates="problem")


def test_a_users_score_rule_reads_the_targets_log_probabilities() -> None:
    """A plain function that reads the log-probabilities is enough as a rule."""
    assert source_of(lambda logprobs, text: 1.0) == "log-probabilities"
    assert source_of(ScoreRule("draft")) == "draft"


def _at(logits: Sequence[float], temperature: float) -> list[float]:
    """Return the probabilities of tokens at a temperature."""
    weights = [math.exp(value / temperature) for value in logits]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize(("temperature", "is_exact"), [(1.0, True), (0.7, False)])
def test_the_speculative_score_is_the_chance_of_acceptance_at_temperature_1(
    temperature: float, is_exact: bool
) -> None:
    """At temperature 1, a chunk with score s passes speculative sampling with probability 1/s in
    simulations. At another temperature it does not.
    """
    draft = [0.0, -0.4, -1.5, -0.2]
    target = [-1.0, 0.3, -0.8, 0.1]
    chunk = (0, 3, 0)
    author, judge = (_at(logits, 1.0) for logits in (draft, target))
    chunk_logprobs = tuple(math.log(author[token]) for token in chunk)
    written = Chunk("draft", "abc", chunk, chunk, "end", chunk_logprobs)
    score = score_of(ScoreRule("speculative"), [math.log(judge[token]) for token in chunk], written)
    draft_chance, target_chance = (_at(logits, temperature) for logits in (draft, target))
    draw = random.Random(4)
    runs = 20_000
    accepted = sum(
        all(draw.random() < target_chance[token] / draft_chance[token] for token in chunk)
        for _ in range(runs)
    )
    error = 4 * math.sqrt(0.25 / runs)
    assert (abs(accepted / runs - 1 / score) < error) == is_exact


@pytest.mark.parametrize(
    ("draft", "target", "kind", "warns"),
    [
        (0.7, None, "speculative", True),
        (1.0, None, "speculative", False),
        (1.0, 0.6, "speculative", True),
        (0.7, None, "mean", False),
    ],
)
def test_a_run_warns_if_the_speculative_score_is_not_a_probability(
    draft: float, target: float | None, kind: ScoreKind, warns: bool
) -> None:
    """If the speculative score is not a probability, the run begins with a warning that gives both
    temperatures and the flag to change.
    """
    policy = Policy(
        score=ScoreRule(kind),
        sampling=Sampling(temperature=draft),
        target_sampling=None if target is None else Sampling(temperature=target),
    )
    words = [text for text in Setup(policy=policy).warnings if "temperature 1" in text]
    assert bool(words) == warns
    if warns:
        assert f"{draft:g} (draft) and {target or draft:g} (target)" in words[0]
