"""The first screen of a calibration report: one sentence, three numbers, and what weighs against
them.
"""

from __future__ import annotations

import math

from atts.analysis.report.headline import percent, span
from atts.analysis.report.numbers import DriftTest, Headline, Point, RateControl, ShownNumber
from atts.calibration import Health

_SPAN = "{} to {}"


def calibration_headline(kind: str, health: Health, control: RateControl) -> Headline:
    """What a person who knows nothing of conformal prediction should take home."""
    drift = _alarms(control)
    return Headline(
        _sentence(kind, health, control), (_share(kind, control), _worth(health), drift)
    )


def calibration_points(kind: str, health: Health, control: RateControl) -> tuple[Point, ...]:
    """What speaks against the calibration, worst first; of scores alone nothing was promised that
    they could break.
    """
    found = list[Point]()
    check = control.check()
    if kind == "run" and check is not None and check.standing != "held":
        found.append(("bad" if check.standing == "left" else "care", str(check)))
    elif check is not None and check.standing == "left":
        found.append(("care", f"decided one by one in their order, {check}"))
    found.extend(
        ("bad", f"alarm after {alarm.scores:,} scores: {alarm.text or alarm.kind}")
        for alarm in control.alarms
    )
    if _is_reached(control.drift) and not control.alarms:
        found.append(
            (
                "care",
                "the drift test reached its line: later questions score otherwise than earlier "
                "ones",
            )
        )
    if control.forced:
        found.append(("care", f"{control.forced:,} decisions had no score to rest on"))
    if kind != "run":
        worst = health.repeats.fault
        found.extend(
            ("bad" if warning == worst else "care", warning) for warning in health.warnings
        )
    return tuple(sorted(found, key=lambda point: point[0] != "bad"))


def _sentence(kind: str, health: Health, control: RateControl) -> str:
    share = percent(control.escalated / control.decisions)
    check = control.check()
    steps = f"{control.decisions:,} steps"
    if kind == "run":
        if check is None:
            return f"the large model was handed {share} of {steps}; no share was promised"
        asked = percent(check.nominal)
        ends = {
            "held": f"as asked ({asked})",
            "unclear": f"where {asked} were asked for, and so few questions cannot tell whether "
            f"that is chance",
            "left": f"where {asked} were asked for: the promise was not kept",
        }
        return f"the large model was handed {share} of {steps}, {ends[check.standing]}"
    low, high = health.long_run_clustered
    return (
        f"asked to hand over {percent(health.rate)} of new steps, a threshold set by these "
        f"{health.scores:,} scores "
        f"would hand over {_SPAN.format(percent(low).removesuffix(' %'), percent(high))}"
    )


def _share(kind: str, control: RateControl) -> ShownNumber:
    share = percent(control.escalated / control.decisions)
    nominal = control.nominal
    counts = f"{control.escalated:,} of {control.decisions:,}"
    if kind == "run":
        asked = "no share was promised" if nominal is None else f"asked for: {percent(nominal)}"
        note = f"{counts}; {asked}; {span(control.rate)} over questions"
        return ShownNumber(share, "of the steps were handed to the large model", note)
    asked = "" if nominal is None else f"; asked for: {percent(nominal)}"
    what = "of these steps would have been handed over, decided one by one"
    return ShownNumber(share, what, f"{counts} in mode {control.promise.mode}{asked}")


def _worth(health: Health) -> ShownNumber:
    clusters = health.clusters
    what = f"independent scores is what these {health.scores:,} are worth"
    if not health.repeats.clustered:
        return ShownNumber(
            f"{clusters.effective:,.0f}",
            what,
            "at most: which question each belongs to is not known",
        )
    alike = (
        ""
        if math.isnan(clusters.icc)
        else f": scores of one question resemble each other ({clusters.icc:.2f})"
    )
    return ShownNumber(
        f"{clusters.effective:,.0f}", what, f"they come from {clusters.clusters:,} questions{alike}"
    )


def _is_reached(drift: DriftTest | None) -> bool:
    """Whether the bet on a change won as much as would surprise once in a hundred times."""
    return drift is not None and drift.peak >= drift.alarm


def _alarms(control: RateControl) -> ShownNumber:
    drift = control.drift
    count = len(control.alarms) + _is_reached(drift)
    what = (
        "alarm that scores changed on the way"
        if count == 1
        else "alarms that scores changed on the way"
    )
    if drift is None:
        return ShownNumber(
            f"{count:,}", what, "too few questions to bet on a change between early and late ones"
        )
    won = (
        f"{10 ** min(drift.peak, 9):,.1f} times its stake; {10**drift.alarm:,.0f} would be an alarm"
    )
    return ShownNumber(
        f"{count:,}", what, f"a bet that late questions score otherwise won at most {won}"
    )
