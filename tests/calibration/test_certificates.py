"""Tests of certificates for policies and for abstention, against enumeration and simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atts.calibration import certify_abstention
from atts.calibration.certificates import (
    Candidate,
    Certificate,
    betting_p_value,
    binomial_p_value,
    certify,
    certify_net,
    fewest_problems,
    lost_answers,
    net_losses,
    net_p_value,
    problems_needed,
    rejected,
    risk_p_value,
)
from atts.errors import CalibrationInputError

EPSILON = 0.2


@pytest.mark.parametrize("n", [1, 4, 9])
def test_binomial_p_value_is_super_uniform_by_enumeration(n: int) -> None:
    """P(p <= a) <= a holds over all 0/1 losses with mean exactly epsilon, and the p-value equals
    its defining sum.
    """
    for level in (0.01, 0.05, 0.1, 0.3, 0.7):
        chance = 0.0
        for losses in product((0, 1), repeat=n):
            weight = EPSILON ** sum(losses) * (1 - EPSILON) ** (n - sum(losses))
            chance += weight * (binomial_p_value(losses, EPSILON) <= level)
        assert chance <= level + 1e-12
    total = sum(math.comb(n, k) * EPSILON**k * (1 - EPSILON) ** (n - k) for k in range(2))
    assert binomial_p_value([1] + [0] * (n - 1), EPSILON) == pytest.approx(total)


@pytest.mark.parametrize("values", [(0, 1), (0, 0.5, 1), (0, 0.25)])
def test_betting_p_values_are_super_uniform_by_enumeration(values: tuple[float, ...]) -> None:
    """For all sequences of two- and three-valued losses with mean epsilon, the betting p-value
    satisfies P(p <= a) <= a.
    """
    laws: dict[tuple[float, ...], tuple[float, ...]] = {
        (0, 1): (0.8, 0.2), (0, 0.5, 1): (0.7, 0.2, 0.1), (0, 0.25): (0.2, 0.8)
    }  # fmt: skip
    law = laws[values]
    assert sum(v * w for v, w in zip(values, law, strict=True)) == pytest.approx(EPSILON)
    outcomes = list(product(range(len(values)), repeat=7))
    weighted = [
        (betting_p_value([values[k] for k in o], EPSILON), math.prod(law[k] for k in o))
        for o in outcomes
    ]
    for level in (0.02, 0.1, 0.3, 0.6, 0.9):
        assert sum(weight for p, weight in weighted if p <= level) <= level + 1e-9


def test_betting_beats_hoeffding_on_fractions() -> None:
    """Means of sixteen samples vary little, so betting certifies them with fewer problems than
    Hoeffding's bound.
    """
    losses = np.random.default_rng(0).binomial(16, 0.03, size=300) / 16
    mean = float(losses.mean())
    entropy = mean * math.log(mean / 0.05) + (1 - mean) * math.log((1 - mean) / 0.95)
    assert betting_p_value(losses, 0.05) < 0.1 * math.exp(-len(losses) * entropy)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=7), st.sampled_from([0.05, 0.1, 0.4]))
def test_fixed_sequence_testing_equals_its_definition(p_values: list[float], delta: float) -> None:
    """In fixed-sequence testing, a hypothesis is rejected only if all hypotheses before it are
    rejected.
    """
    expected = [k for k in range(len(p_values)) if all(p <= delta for p in p_values[: k + 1])]
    assert rejected(p_values, delta) == expected


@pytest.mark.parametrize(
    ("epsilon", "delta", "n"), [(0.02, 0.05, 149), (0.05, 0.05, 59), (0.1, 0.05, 29)]
)
def test_known_sample_sizes_without_a_loss(epsilon: float, delta: float, n: int) -> None:
    """If n problems are the fewest that suffice, n problems without a loss give a certificate, and
    n - 1 do not.
    """
    assert fewest_problems(epsilon, delta) == n
    assert binomial_p_value([0] * n, epsilon) <= delta < binomial_p_value([0] * (n - 1), epsilon)


def test_problems_needed_grow_as_the_loss_nears_epsilon() -> None:
    """The number of problems from `problems_needed` gives a certificate, and half of it does not.
    If the loss is at least epsilon, no number of problems suffices.
    """
    sizes = [problems_needed(risk, 0.05, 0.1) for risk in (0.0, 0.02, 0.04)]
    assert sizes[0] == 45
    for risk, size in zip((0.02, 0.04), sizes[1:], strict=True):
        assert size is not None
        assert binomial_p_value(_with_loss(risk, size), 0.05) <= 0.11
        assert binomial_p_value(_with_loss(risk, size // 2), 0.05) > 0.1
    assert problems_needed(0.05, 0.05, 0.1) is None


def _with_loss(risk: float, n: int) -> list[int]:
    lost = math.ceil(n * risk - 1e-9)
    return [1] * lost + [0] * (n - lost)


def test_loss_counts_problems_that_only_the_target_solves() -> None:
    """The loss counts problems that only the target solves, and problems that only the policy
    solves do not offset them; the samples of a problem count as one unit.
    """
    assert lost_answers([1, 1, 0, 0], [1, 0, 1, 0]).tolist() == [0, 1, 0, 0]
    assert lost_answers([[1, 1, 1, 1]], [[0, 1, 1, 1]]).tolist() == [0.25]
    with pytest.raises(CalibrationInputError):
        lost_answers([1, 0], [1])


def deployment(
    n: int, seed: int, rates: Sequence[float]
) -> tuple[list[Candidate], dict[float, float]]:
    """Simulate a labelled run of problems with different hardness and sixteen samples each, and its
    true losses.
    """
    draw = np.random.default_rng(seed)
    hardness = draw.beta(
        0.3, 1.5, size=n
    )  # probability that a kept chunk loses an answer of the target
    true = {rate: (1 - rate) ** 2 * 0.3 / 1.8 for rate in rates}
    candidates = list[Candidate]()
    for rate in rates:
        lost = draw.binomial(16, (1 - rate) ** 2 * hardness) / 16
        candidates.append(Candidate("conformal", rate, lost.tolist(), rate))
    return candidates, true


@pytest.mark.parametrize("epsilon", [0.02, 0.05])
def test_certificates_are_valid_over_many_deployments(epsilon: float) -> None:
    """The true loss exceeds epsilon in at most a share delta of 150 runs of 300 problems."""
    rates = [k / 20 for k in range(21)]
    wrong = 0
    found = 0
    for seed in range(150):
        candidates, true = deployment(300, seed, rates)
        chosen = certify(candidates, epsilon, 0.1).chosen
        if chosen is not None:
            found += 1
            wrong += true[chosen.rate] > epsilon
    assert found > 100
    assert wrong <= 150 * 0.1 + 2.4 * math.sqrt(150 * 0.1 * 0.9)


def test_the_certified_policy_is_nearly_the_cheapest_safe_one() -> None:
    """With 2,000 problems and epsilon 0.05, the cost of the certified policy is within 25 % of the
    cheapest truly safe policy, in each of ten runs.
    """
    rates = [k / 40 for k in range(41)]
    for seed in range(10):
        candidates, true = deployment(2000, seed, rates)
        chosen = certify(candidates, 0.05, 0.1).chosen
        assert chosen is not None
        assert chosen.cost <= 1.25 * min(rate for rate in rates if true[rate] <= 0.05)


def test_a_fixed_sequence_stops_at_the_first_failure() -> None:
    """A cheap policy after a failed one in the fixed order is not certified although it looks safe,
    because results must not change the order.
    """
    candidates = [
        Candidate("g", 1.0, [0] * 100, 10), Candidate("g", 0.5, [1, 0] * 50, 5), Candidate("g", 0.1, [0] * 100, 1)
    ]  # fmt: skip
    certificate = certify(candidates, 0.05)
    assert certificate.chosen is not None
    assert certificate.chosen.rate == 1.0
    assert [row.p is None for row in certificate.tested] == [False, False, True]


def test_several_gates_share_delta_and_the_cheapest_certified_wins() -> None:
    """Each of two gates is tested at delta / 2, and the cheaper of the certified policies is
    returned.
    """
    n = fewest_problems(0.05, 0.05)
    both = [Candidate("a", 0.5, [0] * n, 4), Candidate("b", 0.3, [0] * n, 2)]
    assert _rate(certify(both, 0.05, 0.1)) == 0.3
    fewer = [Candidate(c.gate, c.rate, [0] * (n - 1), c.cost) for c in both]
    assert certify(fewer, 0.05, 0.1).chosen is None
    assert _rate(certify(fewer[:1], 0.05, 0.1)) == 0.5


def _rate(certificate: Certificate) -> float:
    assert certificate.chosen is not None
    return certificate.chosen.rate


def test_a_failed_certificate_says_how_many_problems_it_needs() -> None:
    """Thirty problems without a loss cannot certify a loss of at most five points. The message
    gives the number of problems needed, or says that no number suffices.
    """
    short = certify([Candidate("g", 1.0, [0] * 30, 1)], 0.05, 0.1)
    assert short.chosen is None
    assert "no policy can be certified with 30 problems" in short.guarantee
    assert "about 45 are needed" in short.guarantee
    hopeless = certify([Candidate("g", 1.0, [1] * 10 + [0] * 20, 1)], 0.05, 0.1)
    assert "with 30 or more problems" in hopeless.guarantee
    good = certify([Candidate("g", 0.4, [0] * 400, 1)], 0.02, 0.1)
    assert "at least 0.9" in good.guarantee
    assert "2.0 %" in good.guarantee
    assert "samples of one problem" in good.voided_by


@pytest.mark.parametrize(
    ("candidates", "epsilon", "delta"),
    [
        ([], 0.05, 0.1),
        ([Candidate("g", 1, [], 1)], 0.05, 0.1),
        ([Candidate("g", 1, [0.5, 1.5], 1)], 0.05, 0.1),
        ([Candidate("g", 1, [math.nan], 1)], 0.05, 0.1),
        ([Candidate("g", 1, [0, 0], 1), Candidate("g", 0.5, [0], 1)], 0.05, 0.1),
        ([Candidate("g", 1, [0], math.nan)], 0.05, 0.1),
        ([Candidate("g", 1, [0], 1)], 0.0, 0.1),
        ([Candidate("g", 1, [0], 1)], 0.05, 1.0),
    ],
)
def test_impossible_certificates_are_refused(
    candidates: list[Candidate], epsilon: float, delta: float
) -> None:
    """Missing candidates, missing problems, values that are not losses, and levels outside (0, 1)
    raise errors instead of giving a certificate.
    """
    with pytest.raises(CalibrationInputError):
        certify(candidates, epsilon, delta)


def test_binomial_for_zero_one_losses_and_betting_for_fractions() -> None:
    """Losses of 0 and 1 get the exact binomial test, and fractions get the betting test; the
    binomial test refuses fractions.
    """
    assert risk_p_value([0.0, 1.0], 0.1) == binomial_p_value([0.0, 1.0], 0.1)
    assert risk_p_value([0.5, 0.0], 0.1) == betting_p_value([0.5, 0.0], 0.1)
    with pytest.raises(CalibrationInputError, match="fraction"):
        binomial_p_value([0.5], 0.1)


@pytest.mark.parametrize(("n", "epsilon"), [(5, 0.1), (5, 0.0), (4, 0.3)])
@pytest.mark.parametrize("differing", [0.3, 1.0])
def test_the_net_p_value_is_super_uniform_by_enumeration(
    n: int, epsilon: float, differing: float
) -> None:
    """P(p <= a) <= a holds over all outcomes of n problems whose mean net loss is exactly epsilon,
    fractions included.
    """
    law = {1.0: (differing + epsilon) / 2, 0.0: 1 - differing, -1.0: (differing - epsilon) / 2}
    fractions = {0.5: 0.4 + epsilon, -0.5: 0.4 - epsilon, 0.0: 0.2}
    exact: list[tuple[float, float]] = []
    # enumerate each multiset of losses once, because the order of losses does not matter
    for losses in combinations_with_replacement(law, n):
        orders = math.factorial(n) / math.prod(math.factorial(losses.count(loss)) for loss in law)
        exact.append(
            (net_p_value(losses, epsilon), orders * math.prod(law[loss] for loss in losses))
        )
    drawn = product(fractions, repeat=n)
    betting = [
        (net_p_value(losses, epsilon), math.prod(fractions[loss] for loss in losses))
        for losses in drawn
    ]
    for found in (exact, betting):
        for level in (0.01, 0.05, 0.1, 0.4, 0.8):
            assert sum(weight for p, weight in found if p <= level) <= level + 1e-9


def noisy(
    rate: float, draw: np.random.Generator, problems: int = 2000
) -> tuple[list[bool], list[bool]]:
    """Sample whether the votes of a target and of a policy are correct. The two err independently,
    on one problem in twelve; then a share `rate` of the policy's votes is corrected, or made wrong
    if `rate` is negative.
    """
    known = draw.random(problems) < 0.75
    target, policy = (np.where(draw.random(problems) < 1 / 12, ~known, known) for _ in range(2))
    mended = draw.random(problems) < abs(rate)
    return target.tolist(), np.where(mended, rate > 0, policy).tolist()


def test_only_the_net_certificate_calls_two_equal_runs_alike() -> None:
    """Two runs of the same models each solve some problems that the other run does not, so the
    gross loss is large and the net loss is not.
    """
    certified = 0
    old = 0
    for seed in range(10):
        target, policy = noisy(0.0, np.random.default_rng(seed))
        candidate = [Candidate("split", 0.3, net_losses(target, policy).tolist(), 1.0)]
        certified += certify_net(candidate, 0.03).chosen is not None
        old += (
            certify(
                [Candidate("split", 0.3, lost_answers(target, policy).tolist(), 1.0)], 0.03
            ).chosen
            is not None
        )
    assert certified >= 8
    assert not old


def test_a_policy_like_the_embedded_default_is_certified_at_two_points() -> None:
    """A policy that loses 0.74 % of 2,000 problems and wins 0.62 % is certified to lose at most
    0.02. A policy with a net loss of 2.4 % is not certified.
    """
    losses = [1.0] * 15 + [-1.0] * 12 + [0.0] * 1973
    found = certify_net([Candidate("aci", 0.19, losses, 143.6)], 0.02)
    assert found.chosen is not None
    assert found.chosen.p is not None
    assert found.chosen.p < 0.002
    worse = [1.0] * 60 + [-1.0] * 12 + [0.0] * 1928
    assert certify_net([Candidate("aci", 0.19, worse, 143.6)], 0.02).chosen is None


def test_a_worse_policy_is_hardly_ever_certified_and_a_better_one_is_superior() -> None:
    """A worse policy is certified in less than a share delta of runs, and a better one is reported
    as superior.
    """
    wrong = sum(
        certify_net(
            [
                Candidate(
                    "a",
                    0.3,
                    net_losses(*noisy(-0.05, np.random.default_rng(seed), 600)).tolist(),
                    1,
                )
            ],
            0.02,
        ).chosen
        is not None
        for seed in range(60)
    )
    assert wrong <= 6
    better = certify_net(
        [Candidate("a", 0.3, net_losses(*noisy(0.2, np.random.default_rng(1))).tolist(), 1.0)], 0.02
    )
    assert better.superior is not None
    assert "correct more often than the target alone" in better.guarantee
    assert "at most 2.0 % less often" in better.guarantee
    few = certify_net([Candidate("a", 0.3, [0.0] * 20 + [1.0, -1.0] * 5, 1.0)], 0.02)
    assert few.chosen is None
    assert "are needed" in few.guarantee


def test_a_policy_without_losses_is_asked_for_more_problems() -> None:
    """The message on a failed certificate without losses asks for more problems: twenty problems do
    not certify a loss below five points.
    """
    alike = certify_net([Candidate("a", 0.3, [0.0] * 20, 1.0)], 0.05)
    assert alike.chosen is None
    assert alike.needed == 45
    assert "about 45 are needed" in alike.guarantee
    assert certify_net([Candidate("a", 0.3, [0.0] * 2 * 45, 1.0)], 0.05).chosen is not None


def labelled(n: int, seed: int, slope: float) -> tuple[list[float], list[bool]]:
    """Sample each problem's confidence, a multiple of 1/8, and whether its answer is wrong. More
    confident answers are wrong less often.
    """
    draw = np.random.default_rng([seed, n])
    confidence = draw.integers(2, 9, n) / 8
    return confidence.tolist(), (draw.random(n) < slope * (1 - confidence) + 0.03).tolist()


def true_risk(threshold: float, slope: float) -> float:
    """Return the probability that an answered problem of `labelled` is wrong."""
    levels = [step / 8 for step in range(2, 9) if step / 8 >= threshold - 1e-9]
    return sum(slope * (1 - level) + 0.03 for level in levels) / len(levels)


@pytest.mark.parametrize("slope", [0.25, 0.5, 0.9])
def test_abstention_keeps_its_risk_with_the_promised_probability(slope: float) -> None:
    """At most a tenth of 300 calibration runs get a threshold whose answers are wrong more than one
    time in ten.
    """
    broken = certified = 0
    for seed in range(300):
        found = certify_abstention(*labelled(400, seed, slope), risk=0.1, kept=0.9)
        if found.threshold is not None:
            certified += 1
            broken += true_risk(found.threshold, slope) > 0.1
    assert certified > 100
    assert broken <= 0.1 * 300


def test_thresholds_of_abstention_computed_by_hand() -> None:
    """The threshold excludes less confident problems if their answers are wrong, and is 0 if all
    answers are correct. If the votes of no problem agree enough, atts certifies no threshold.
    """
    found = certify_abstention([1.0] * 40 + [0.5] * 40, [False] * 40 + [True] * 40, 0.1)
    assert (found.threshold, found.answered, found.wrong) == (0.55, 40, 0)
    assert "the share of wrong answers among the given answers is at most 0.1" in found.guarantee
    all_right = certify_abstention([0.6] * 60, [False] * 60, 0.1)
    assert all_right.threshold == 0.0
    unsure = certify_abstention([0.5] * 60, [False] * 60, 0.1)
    assert unsure.threshold is None
    assert "at least 60 % of the votes agree in none" in unsure.guarantee


def test_too_few_correct_answers_certify_no_threshold() -> None:
    """Twenty-eight correct answers do not certify a risk of a tenth, and the message gives the
    sufficient number of problems.
    """
    found = certify_abstention([1.0] * 28 + [math.nan] * 28, [False] * 56, 0.1)
    assert found.threshold is None
    assert found.needed == 58
    assert "about 58" in found.guarantee
    more = certify_abstention([1.0] * 29 + [math.nan] * 29, [False] * 58, 0.1)
    assert more.threshold == 0.0


def test_answers_that_are_often_wrong_are_never_certified() -> None:
    """If the most certain answers are wrong in two of three cases, atts certifies no threshold.

    The message says that no number of problems suffices.
    """
    found = certify_abstention([1.0] * 90, ([True] + [False] * 2) * 30, 0.1)
    assert (found.threshold, found.needed) == (None, None)
    assert "with any number of problems" in found.guarantee


@pytest.mark.parametrize(
    ("confidence", "wrong", "risk", "kept"),
    [
        ([], [], 0.1, 0.9),
        ([1.5], [True], 0.1, 0.9),
        ([0.5], [True, False], 0.1, 0.9),
        ([1], [True], 0, 0.9),
        ([1], [True], 0.1, 1),
    ],
)
def test_impossible_abstention_data_is_refused(
    confidence: list[float], wrong: list[bool], risk: float, kept: float
) -> None:
    """Empty data, confidences that are not shares, unequal lengths and impossible levels raise
    errors.
    """
    with pytest.raises(CalibrationInputError):
        certify_abstention(confidence, wrong, risk, kept)
