"""The commands that compare and analyse recorded runs: compare, certify, replay and plan."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atts.cli.options import Json, RunDirectory
from atts.cli.terminal import json_line, print_result, say, tell
from atts.errors import CheckFailed, OptionError, counted

if TYPE_CHECKING:
    from atts.analysis import (
        Advice,
        ChunkAdvice,
        Compared,
        Option,
        Referee,
        Replay,
        ReplaySide,
        RuleRow,
    )
    from atts.calibration import Certificate
    from atts.evaluators import Comparison


Run = Annotated[
    Path, typer.Argument(help="Run directory, or a file with the output of `atts eval --json`.")
]
# If more problems than this are needed for 80 % power, print "more than 100,000".
_MANY = 100_000
# largest number of differing settings that a comparison prints
_SHOWN_SETTINGS = 5
# A longer value of a setting is not printed.
_LONG_VALUE = 40


def compare(
    first: Run,
    second: Run,
    sequential: Annotated[
        bool,
        typer.Option(
            "--sequential",
            help="Also report after how many problems it was known which run is better.",
        ),
    ] = False,
    points: Annotated[
        float,
        typer.Option(
            help="With --sequential: count two runs as equally accurate if they differ by at "
            "most this many percentage points."
        ),
    ] = 0.0,
    seed: Annotated[
        int,
        typer.Option(help="With --sequential: random seed for the order of the problems."),
    ] = 0,
    as_json: Json = False,
) -> None:
    """Compare two runs problem by problem: accuracy with an interval, and costs as ratios.

    Intervals and p-values are clustered by problem: the rollouts of a problem do not count as
    independent.

    --sequential reads the problems one by one in a random order. Its interval is valid after every
    problem, so a result may be read at any time. `atts eval --compare-to RUN --stop-when decided`
    stops a run as soon as this interval decides which run is better.

    Example: atts compare runs/target-only runs/first
    """
    from atts.api import compare as compared

    if points and not sequential:
        raise OptionError("--points", "this option needs --sequential")
    comparison = compared(first, second, points=points if sequential else None, seed=seed)
    left_out = comparison.only_first + comparison.only_second
    if left_out:
        tell(
            "atts: left out, because they are in only one of the runs: "
            f"{counted(comparison.only_first, 'problem')} of {comparison.first}, and "
            f"{counted(comparison.only_second, 'problem')} of {comparison.second}",
        )
    print_result(comparison, as_json, _comparison_lines)


def _comparison_lines(comparison: Compared) -> list[str]:
    names = [
        f"{run} ({method})" if method else run
        for run, method in zip(
            (comparison.first, comparison.second), comparison.methods, strict=True
        )
    ]
    common = f"{counted(comparison.problems, 'problem')} in common"
    lines = [f"{names[0]} → {names[1]}", common, *_setting_lines(comparison)]
    if any(comparison.cut):
        (first_cut, second_cut), (first_all, second_all) = comparison.cut, comparison.rollouts
        lines.append(
            f"{'cut':<16}{first_cut:,} of {counted(first_all, 'rollout')} in the first run, "
            f"{second_cut:,} of {second_all:,} in the second"
        )
    lines.append("")
    # If each problem has one rollout or one answer, the vote and the single rollouts are equally
    # accurate. Then print this accuracy only once.
    is_one = comparison.single is not None and _is_same(comparison.vote, comparison.single)
    is_vote = comparison.mcnemar is not None
    lines += _accuracy_lines("vote" if is_vote or not is_one else "accuracy", comparison.vote)
    if comparison.if_right is not None:
        first, second = comparison.unscored
        between = comparison.if_right.difference.signed()
        lines.append(
            f"{'':16}answers that could not be graded count as wrong ({first} in the first run, "
            f"{second} in the second); if they counted as correct, the difference would be "
            f"{between}"
        )
    if comparison.mcnemar is not None:
        pairs = comparison.mcnemar
        lines.append(
            f"{'':16}problems answered correctly by both runs: {pairs.both}, only by the first: "
            f"{pairs.first_only}, only by the second: {pairs.second_only}, by neither: "
            f"{pairs.neither}"
        )
    if comparison.sequential is not None:
        lines.append(f"{'sequential':16}second run {comparison.sequential}")
    if comparison.single is not None and not is_one:
        lines += _accuracy_lines("one rollout", comparison.single)
    lines += _coin_lines(comparison.methods)
    if comparison.costs:
        lines += ["", f"{'per problem':<16}{'first':>12}{'second':>12}   second / first"]
    for cost in comparison.costs:
        ratio = f"{cost.ratio:.3f} [{cost.low:.3f}, {cost.high:.3f}]"
        if math.isinf(cost.ratio):
            ratio = "the first run has none"
        elif math.isnan(cost.ratio):
            ratio = "neither run has any"
        elif math.isnan(cost.low):
            ratio = f"{cost.ratio:.3f} (no interval for a single problem)"
        name = "seconds" if cost.name == "seconds" else cost.name.replace("_", " ")
        form = ",.6f" if cost.name == "dollars" else ",.1f"
        lines.append(f"{name:<16}{cost.first:>12{form}}{cost.second:>12{form}}   {ratio}")
        if cost.unknown:
            lines.append(
                f"{'':16}without {counted(cost.unknown, 'problem')} whose seconds are unknown, for "
                "example because a session was killed"
            )
    if any(cost.name == "seconds" for cost in comparison.costs):
        lines.append(
            "Problems run in parallel, so the seconds of all problems add up to more than the "
            "duration of the run."
        )
    return [*lines, "Brackets are 95 % intervals over problems."]


def _setting_lines(comparison: Compared) -> list[str]:
    """Return one line with the first settings that differ; no line if none differ."""
    if not comparison.settings:
        return []
    parts = [
        f"{one.name} {_setting_text(one.first)} → {_setting_text(one.second)}"
        for one in comparison.settings[:_SHOWN_SETTINGS]
    ]
    more = len(comparison.settings) - len(parts)
    end = f", and {more} more" if more else ""
    return [f"{'settings differ':<16}{', '.join(parts)}{end}"]


def _setting_text(value: Any) -> str:
    """Return a setting's value as a short string; of a long text, return only its length."""
    if value is None:
        return "none"
    # Strings are quoted, because spaces and commas would hide where they end. Names of models and
    # values such as "majority" need no quotes.
    is_word = isinstance(value, str) and re.fullmatch(r"[\w./:-]+", value)
    text = value if is_word else json_line(value)
    return f"({len(text):,} characters)" if len(text) > _LONG_VALUE else text


def _is_same(first: Comparison, second: Comparison) -> bool:
    """Return whether two comparisons have the same values; if so, only one comparison is printed."""
    return (first.first, first.second) == (
        second.first,
        second.second,
    ) and first.tied == second.tied


def _coin_lines(methods: tuple[str, str]) -> list[str]:
    """Return lines that tell the user to read the difference as the gain over random escalation.
    Return no lines unless exactly one run used the method `coin`.
    """
    first, second = methods
    fair = "The comparison is fair if both runs spent the same number of target tokens."
    if first == "coin" and second not in ("coin", ""):
        return [
            "",
            "The first run escalated at random (coin), so the difference is the gain of "
            f"{second} over the coin. {fair}",
        ]
    if second == "coin" and first not in ("coin", ""):
        return [
            "",
            f"The second run escalated at random (coin), so the gain of {first} over the coin "
            f"is the difference with its sign reversed. {fair}",
        ]
    return []


def _accuracy_lines(name: str, accuracy: Comparison) -> list[str]:
    between = accuracy.difference
    ends = "" if math.isnan(between.low) else f" [{between.low:+.3f}, {between.high:+.3f}]"
    lines = [
        f"{name:<16}{accuracy.first:.3f} → {accuracy.second:.3f}   difference "
        f"{accuracy.second - accuracy.first:+.3f}{ends}, "
        f"p = {accuracy.p_value:.3g}",
        f"{'':16}better on {counted(accuracy.better, 'problem')}, worse on {accuracy.worse}, the "
        f"same on {accuracy.tied}",
    ]
    if accuracy.problems_needed:
        needed = (
            f"{accuracy.problems_needed:,}"
            if accuracy.problems_needed <= _MANY
            else f"more than {_MANY:,}"
        )
        lines.append(
            f"{'':16}{needed} similar problems would be needed to detect a difference of this "
            "size with 80 % power"
        )
    return lines


def certify(
    target: Annotated[
        Path,
        typer.Argument(
            help="Directory of a run with the target alone, on problems with reference answers."
        ),
    ],
    runs: Annotated[
        list[Path], typer.Argument(help="Directories of the runs to certify, on the same problems.")
    ],
    epsilon: Annotated[
        float,
        typer.Option(
            help="Largest acceptable loss of accuracy compared with the target alone; 0.02 "
            "means 2 percentage points."
        ),
    ] = 0.02,
    delta: Annotated[
        float, typer.Option(help="Acceptable probability that the certificate is wrong.")
    ] = 0.1,
    lost: Annotated[
        bool,
        typer.Option(
            "--lost",
            help="Certify the share of problems that only the target answers correctly. Do not "
            "subtract the share that only the run answers correctly.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Certify the cheapest policy that is correct nearly as often as the target alone.

    "Nearly" means that the accuracy on new problems is at most --epsilon lower. Runs of the same
    method and rate scope are tested from the highest rate to the lowest, until a test fails. The
    bound is on the net loss: the correct answers that the policy loses minus the correct answers
    that it wins. If no policy is certified, the exit code is 5, and the output says how many
    problems are needed.

    Example: atts certify runs/target-only runs/first --epsilon 0.02
    """
    from atts.api import certify as certified

    certificate = certified(target, runs, epsilon=epsilon, delta=delta, net=not lost)
    print_result(certificate, as_json, _certificate_lines)
    if certificate.chosen is None:
        raise CheckFailed(certificate.guarantee)


def _certificate_lines(certificate: Certificate) -> list[str]:
    lines = [f"{'policy':<28}{'rate':>6}{'loss':>10}{'p':>10}{'target tokens':>16}   certified"]
    for row in certificate.tested:
        p = "-" if row.p is None else f"{row.p:.2g}"
        verdict = "yes" if row.certified else "no"
        lines.append(
            f"{row.gate:<28}{row.rate:>6g}{100 * row.loss:>+8.2f} "
            f"%{p:>10}{row.cost:>16,.1f}   {verdict}"
        )
    return [
        *lines,
        "",
        f"guarantee  {certificate.guarantee}",
        f"voided by  {certificate.voided_by}",
    ]


def replay(
    directory: RunDirectory,
    method: Annotated[
        str | None,
        typer.Option(
            help="Method whose gate makes the decisions of the replay, such as atts, coin or "
            "top-b.",
            show_default="as recorded",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Share of chunks to escalate in the replay.", show_default="as recorded"),
    ] = None,
    rate_scope: Annotated[
        str | None,
        typer.Option(
            help="Where the escalation rate is controlled: over all chunks (aci, marginal, "
            "split), within each question (question), or within each turn of a question "
            "(question-turn).",
            show_default="as recorded",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(help="Number of rollouts of each problem to use, starting with the first."),
    ] = None,
    turns: Annotated[
        int | None,
        typer.Option(help="Number of turns of each rollout to use, starting with the first."),
    ] = None,
    vote: Annotated[
        str | None,
        typer.Option(
            help="How votes are weighted: majority (all votes count the same), confidence (each "
            "vote is weighted by the geometric mean of its rollout's token probabilities)."
        ),
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(help="Largest number of chunks per problem that the target may rewrite."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Random seed for the gate's decisions; with --rules, for the random orders in "
            "which rollouts arrive.",
            show_default="as recorded",
        ),
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option(
            help="Do not replay decisions on chunks, but compare rules that decide how many "
            "rollouts to sample or how to vote: all, or names such as exact,beta,doubling."
        ),
    ] = None,
    orders: Annotated[
        int | None,
        typer.Option(
            help="With --rules: number of random orders in which each rule gets the rollouts.",
            show_default="200, or fewer if the run has more than 100 problems",
        ),
    ] = None,
    match: Annotated[
        str | None,
        typer.Option(
            help="With --rules: compare rules at the same budget of samples, tokens, seconds or "
            "dollars.",
            show_default="samples",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay a run's decisions on its recorded scores under another gate, rate, budget or vote.

    Fewer rollouts and turns are also possible; this change alone does not change any decision.
    The text after a changed decision was never written, so the end of the rollout is unknown. If
    unknown rollouts could change votes, bounds are printed instead of an accuracy, and the numbers
    of tokens are unknown. The bounds contain the accuracy of a live run 95 % of the time.

    --rules applies the stopping rules of atts and of other tools to the recorded rollouts, which
    arrive one at a time in random orders. For each rule it prints the cost, how often the rule's
    vote differs from the vote of all rollouts, and the accuracy compared with a fixed number of
    rollouts at the same cost. Use a run made with --early-stop none, because only such a run has
    all rollouts.

    Example: atts replay runs/first --rate 0.4 --samples 4

    Example: atts replay runs/theirs --rules all
    """
    from atts.api import replay as again

    if rules is not None:
        others = {
            "--method": method, "--rate": rate, "--rate-scope": rate_scope, "--turns": turns,
            "--vote": vote, "--budget": budget,
        }  # fmt: skip
        for option, value in others.items():
            if value is not None:
                raise OptionError(
                    option,
                    "this option changes decisions on chunks, but --rules compares rules for "
                    "whole rollouts; leave out one of the two",
                )
        _play_rules(directory, rules, samples, orders, seed, match, as_json=as_json)
        return
    for option, value in (("--orders", orders), ("--match", match)):
        if value is not None:
            raise OptionError(option, "this option needs --rules")
    # typed `Any`, because `again` checks whether these texts are allowed values
    words: Any = {
        "rate_scope": rate_scope,
        "vote": vote,
    }
    replayed = again(
        directory,
        method=method,
        rate=rate,
        samples=samples,
        turns=turns,
        budget=budget,
        seed=seed,
        **words,
    )
    for line in _replay_objects(replayed) if as_json else _replay_lines(replayed):
        say(line)


def _play_rules(
    directory: Path,
    rules: str,
    samples: int | None,
    orders: int | None,
    seed: int | None,
    match: str | None,
    *,
    as_json: bool,
) -> None:
    """Print the cost and the accuracy of each stopping rule on a run's rollouts."""
    from atts.analysis import RefereeOptions, referee_run
    from atts.journal import open_run

    run = open_run(directory)
    # typed `Any`, because `RefereeOptions` checks whether this text is an allowed value
    words: Any = {} if match is None else {"unit": match}
    options = RefereeOptions(
        rules=[name.strip() for name in rules.split(",") if name.strip()],
        samples=samples,
        orders=orders,
        seed=run.manifest.seed if seed is None else seed,
        **words,
    )
    found = referee_run(run, options)
    if as_json:
        facts = asdict(replace(found, rows=()))
        del facts["rows"]
        lines = [{"type": "rule", **row.as_json()} for row in found.rows]
        say("\n".join(map(json_line, [*lines, {"type": "summary", **facts}])))
    else:
        say("\n".join(_rule_lines(found)))


def _rule_lines(found: Referee) -> Iterator[str]:
    """Yield one row per rule, the meaning of the columns, and notes on the numbers."""
    yield (
        f"{counted(found.problems, 'problem')} with {counted(found.rollouts, 'rollout')}, up to "
        f"{found.most:,} per problem, in {counted(found.orders, 'random order')} (seed "
        f"{found.seed})"
    )
    yield ""
    costs = [unit for unit in ("tokens", "seconds", "dollars") if _is_known(found, unit)]
    wide = max(len(row.rule) for row in found.rows)
    head = f"{'rule':<{wide}}  {'samples':>17}" + "".join(f"{unit:>10}" for unit in costs)
    yield (
        f"{head}  {'changed':>8}  {'accuracy':<20}  {'minus all':<23}  {'minus fixed':<23}  "
        f"{'1 point':>7}"
    )
    for row in found.rows:
        yield _rule_row(row, wide, costs).rstrip()
    yield ""
    yield from _rule_notes(found)


def _is_known(found: Referee, unit: str) -> bool:
    return not any(math.isnan(getattr(row, unit)) for row in found.rows)


def _rule_row(row: RuleRow, wide: int, costs: list[str]) -> str:
    samples = f"{row.samples.value:.1f}"
    if row.samples.low < row.samples.high:
        samples += f" [{row.samples.low:.1f}, {row.samples.high:.1f}]"
    spent = "".join(f"{_cost(getattr(row, unit)):>10}" for unit in costs)
    need = "" if row.problems_for_a_point is None else f"{row.problems_for_a_point:,}"
    return (
        f"{row.rule:<{wide}}  {samples:>17}{spent}  {f'{100 * row.changed.value:.2f} %':>8}  "
        f"{row.accuracy.brief('-'):<20}  {_difference(row.against_all):<23}  "
        f"{_difference(row.against_fixed):<23}  {need:>7}"
    )


def _cost(value: float) -> str:
    """Return a mean cost as a string: without decimals from 100 on, with three significant digits
    below 100.
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _difference(compared: Comparison | None) -> str:
    """Return a difference of accuracies as a string, with its interval if it has one."""
    if compared is None:
        return ""
    found = compared.difference
    if math.isnan(found.low):
        return f"{found.value:+.3f}"
    return f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def _rule_notes(found: Referee) -> Iterator[str]:
    """Yield notes on the columns, on each rule, and on the rollouts and rules that were
    left out.
    """
    yield (
        "changed: share of answers that differ from the vote of all rollouts. minus all: "
        "accuracy minus that of the vote of all rollouts."
    )
    yield (
        "minus fixed: accuracy minus that of the vote of a fixed number of rollouts with the "
        f"same mean cost in {found.unit}. 1 point: number of problems needed to detect a"
    )
    yield (
        "difference of 1 percentage point from the vote of all rollouts with 80 % power. "
        "Brackets are 95 % intervals over problems."
    )
    about = [
        f"{row.rule}: {row.about}{f' ({row.whose})' if row.whose else ''}" for row in found.rows
    ]
    yield from ("", *about)
    if found.censored:
        yield ""
        yield (
            f"left out: {counted(found.censored, 'rollout')} stopped before they gave an answer. "
            "This biases the results towards fast rollouts; a run with --early-stop none records "
            "all rollouts"
        )
    if found.ungraded:
        yield f"left out: {counted(found.ungraded, 'problem')} without a verdict"


def _replay_objects(replayed: Replay) -> Iterator[str]:
    """Yield one JSON object per decision and per problem, then the summary."""
    decisions = (
        {
            "type": "decision",
            "problem": pair.decision.question,
            **{
                name: getattr(pair.decision, name)
                for name in ("sample", "turn", "score", "p", "action", "why")
            },
            "recorded": pair.recorded.action,
            "off_policy": pair.off_policy,
        }
        for pair in replayed.decisions
    )
    problems = (
        {"type": "problem", "problem": name, "answer": new, "recorded": old}
        for name, (old, new) in replayed.answers.items()
    )
    names = ("nominal", "changed", "off_policy", "undecided", "censored", "note")
    rest = {name: getattr(replayed, name) for name in names}
    sides = {name: asdict(getattr(replayed, name)) for name in ("recorded", "replayed")}
    summary = {"type": "summary", **rest, **sides}
    yield from map(json_line, chain(decisions, problems, [summary]))


def _replay_lines(replayed: Replay) -> list[str]:
    """Return notes on how reliable the numbers are, then a table with the recorded and the replayed
    run.
    """
    old = replayed.recorded
    new = replayed.replayed
    rows = [
        ("", "recorded", "replayed"),
        ("escalated chunks", *map(_replay_rate, (old, new))),
        ("accuracy", *map(_replay_accuracy, (old, new))),
        ("decisions", f"{old.decisions:,}", f"{new.decisions:,}"),
        ("tokens, draft", *(_replay_tokens(side, side.draft_tokens) for side in (old, new))),
        ("tokens, target", *(_replay_tokens(side, side.target_tokens) for side in (old, new))),
        ("tokens, scored", *(_replay_tokens(side, side.scored_tokens) for side in (old, new))),
    ]
    asked = "" if replayed.nominal is None else f" (nominal rate {replayed.nominal:g})"
    width = max(24, *(len(one) + 2 for _, one, _ in rows))
    table = [
        f"{name:<20}{one:<{width}}{other}{asked if name == 'escalated chunks' else ''}"
        for name, one, other in rows
    ]
    notes = [f"{replayed.changed:,} of {counted(new.decisions, 'decision')} changed."]
    if old.draft_tokens != new.draft_tokens:
        notes.append(
            "Column recorded: decisions of the replayed rollouts; accuracy and tokens of the "
            "whole run."
        )
    if replayed.note:
        notes.append(f"Note: {replayed.note}.")
    return [*_off_policy_lines(replayed), *table, "", *notes]


def _replay_tokens(side: ReplaySide, count: int | None) -> str:
    if count is None:
        return "unknown"
    return f"at least {count:,}" if side.tokens == "at least" else f"{count:,}"


def _replay_rate(side: ReplaySide) -> str:
    """Return the escalation rate as a string. If some replayed decisions differ, the rate covers
    only recorded chunks, because the text after a changed decision is unknown.
    """
    if math.isnan(side.rate.low) and not math.isnan(side.rate.value):
        return f"{side.rate.value:.3f} of recorded chunks"
    return side.rate.counted()


def _replay_accuracy(side: ReplaySide) -> str:
    """Return the accuracy as a string, or its bounds if the recorded run does not determine the
    accuracy.
    """
    accuracy = side.accuracy
    if accuracy.method == "bounds":
        return f"not known exactly, but between {accuracy.low:.3f} and {accuracy.high:.3f}"
    return accuracy.brief("-")


def _off_policy_lines(replayed: Replay) -> Iterator[str]:
    """Yield notes on results that the recorded run does not determine."""
    if replayed.off_policy > 0:
        yield (
            f"{100 * replayed.off_policy:.1f} % of the rollouts would have a different decision "
            "at some chunk, so the rest of their text is unknown."
        )
    if replayed.undecided:
        yield (
            f"The vote is unknown for {replayed.undecided:,} of "
            f"{counted(len(replayed.answers), 'problem')}. The lower bound of the accuracy counts "
            "rollouts whose remaining text is unknown as wrong, and the upper bound counts them "
            "as correct; both bounds include the 95 % interval."
        )
    if replayed.censored:
        yield (
            f"Left out: {counted(replayed.censored, 'problem')} whose rollouts were all stopped "
            "before they gave an answer."
        )
    if replayed.off_policy > 0 or replayed.undecided or replayed.censored:
        yield ""


def plan(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Directories of runs on the same problems, for example at several rates."
        ),
    ],
    target_tokens: Annotated[
        float | None, typer.Option(help="Cap on the tokens that the target writes per problem.")
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(help="Cap on the tokens that draft and target together write per problem."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Cap on the seconds from the start of a problem to the end of its last rollout."
        ),
    ] = None,
    dollars: Annotated[
        float | None,
        typer.Option(help="Cap on the dollars per problem, at the prices that the runs recorded."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Advise on the rate, samples, turns and chunk length under a cap per problem.

    The estimates use recorded rollouts, subsets of these rollouts, and their first turns. The
    accuracy at a rate without a run is estimated by bounds. The output says how each number was
    estimated.

    Example: atts plan runs/first --target-tokens 300

    Example: atts plan runs/rate-0.1 runs/rate-0.2 runs/rate-0.4 --seconds 20
    """
    from atts.api import plan as planned

    advice = planned(
        runs, target_tokens=target_tokens, tokens=tokens, seconds=seconds, dollars=dollars
    )
    print_result(advice, as_json, _advice_lines)


def _advice_lines(advice: Advice) -> list[str]:
    lines = [
        f"From {', '.join(advice.runs)}: {counted(advice.problems, 'problem')}, "
        f"{counted(advice.rollouts, 'complete rollout')}",
        "",
    ]
    lines += _best_lines(advice)
    lines += ["", "Pareto-optimal settings, per problem:", *_option_lines(advice.options)]
    if advice.other_rates:
        lines += [
            "",
            "Estimates for rates without a recorded run, from decisions on the recorded scores:",
        ]
        lines.append(
            f"  {'rate':>5}{'realised':>10}{'target tokens':>15}   accuracy between     unknown "
            "rollouts"
        )
        for guess in advice.other_rates:
            between = f"{guess.low:.3f} and {guess.high:.3f}"
            lines.append(
                f"  {guess.rate:>5g}{guess.realised:>10.3f}{guess.target_tokens:>15,.0f}   "
                f"{between:<21}"
                f"{100 * guess.off_policy:>14.1f} %"
            )
        lines.append(
            "  For better estimates, start a run at one of these rates (--limit 20), and give "
            "both runs to `atts plan`."
        )
    if advice.chunks is not None:
        lines += ["", *_chunk_lines(advice.chunks)]
    lines += ["", "Measured speeds:"]
    for speed in advice.speeds:
        scored = (
            f" and scores {speed.scored_per_second:,.0f} per second"
            if speed.scored_per_second
            else ""
        )
        lines.append(
            f"  {speed.engine:<8}writes {speed.written_per_second:,.0f} tokens per second{scored} "
            f"while it is busy. It was busy for {speed.busy_seconds:,.1f} s, with "
            f"{counted(speed.calls, 'call')} of {speed.seconds_per_call * 1000:,.0f} ms on average"
        )
    return [*lines, "", *advice.notes]


def _best_lines(advice: Advice) -> list[str]:
    caps = " and ".join(f"{value:g} {name.replace('_', ' ')}" for name, value in advice.cap.given)
    under = f"Under {caps} per problem" if caps else "Without a cap"
    if advice.best is None:
        cheapest = advice.options[0]
        return [
            f"{under}: no recorded setting stays below the cap.",
            f"The cheapest setting takes {cheapest.target_tokens:,.0f} target tokens, "
            f"{cheapest.tokens:,.0f} tokens in all and {cheapest.seconds:,.1f} s; its accuracy is "
            f"{cheapest.accuracy.value:.3f}.",
        ]
    best = advice.best
    rate = f" at rate {best.rate:g}" if _has_rate(best.method) else ""
    limit = f", at most {counted(best.turns, 'turn')}" if best.is_cut else ""
    return [
        f"{under}: {best.method}{rate}, {counted(best.samples, 'sample')}{limit} (from {best.run})",
        f"  accuracy    {best.accuracy}",
        f"  per problem {best.draft_tokens:,.0f} draft, {best.scored_tokens:,.0f} scored, "
        f"{best.target_tokens:,.0f} target tokens; {best.seconds:,.2f} s"
        f"{'' if best.dollars is None else f', ${best.dollars:.6f}'}",
        f"  flags       {option_flags(best)}",
    ]


def _has_rate(method: str) -> bool:
    """Return whether the method has a nominal rate; an unknown method counts as one that has."""
    from atts.methods import PRESETS

    return next((row.has_rate for row in PRESETS if row.name == method), True)


def option_flags(option: Option) -> str:
    """Return the flags of a run with this option. The limit on turns is left out if no recorded
    rollout is longer, because atts computes the limit from the token limit.
    """
    flags = [f"--method {option.method}"]
    if _has_rate(option.method):
        flags.append(f"--rate {option.rate:g}")
    flags.append(f"--samples {option.samples}")
    if option.is_cut:
        flags.append(f"--turns {option.turns}")
    return " ".join(flags)


def _option_lines(options: Sequence[Option]) -> Iterator[str]:
    """Yield a table of options, with their cost in dollars if a price is known."""
    has_prices = any(option.dollars is not None for option in options)
    costs = ("target tokens", "all tokens", "seconds", *(("dollars",) if has_prices else ()))
    yield _option_columns(("method", "rate", "samples", "turns", *costs, "accuracy"))
    for option in options:
        rate = f"{option.rate:g}" if _has_rate(option.method) else ""
        chosen = (option.method, rate, str(option.samples), str(option.turns))
        numbers = [
            f"{option.target_tokens:,.0f}",
            f"{option.tokens:,.0f}",
            f"{option.seconds:,.2f}",
        ]
        if has_prices:
            numbers.append("-" if option.dollars is None else f"{option.dollars:.6f}")
        yield _option_columns((*chosen, *numbers, option.accuracy.brief("-")))


def _option_columns(cells: Sequence[str]) -> str:
    """Return a table row in which the first and the last cell are left-aligned, and the others
    right-aligned.
    """
    widths = (6, 9, 7, 15, 12, 10, 12)
    between = "".join(f"{cell:>{width}}" for cell, width in zip(cells[1:-1], widths, strict=False))
    return f"  {cells[0]:<14}{between}   {cells[-1]}"


def _chunk_lines(advice: ChunkAdvice) -> list[str]:
    lines = [
        f"Chunks: {100 * advice.cut:.1f} % of the draft's chunks were cut at the limit of "
        f"{advice.limit} tokens. A fixed time per turn makes up {100 * advice.fixed:.0f} % of a "
        f"rollout's time (estimated by a linear fit with R² = {advice.fit:.2f})."
    ]
    for choice in advice.choices:
        lines.append(
            f"  limit {choice.limit:>5}: {choice.turns:.2f} times as many turns and "
            f"{choice.seconds:.2f} times as many seconds as with the recorded limit"
        )
    return [
        *lines,
        "  To learn how another limit changes the accuracy, start a run with --set "
        "chunking.draft_tokens=...",
    ]
