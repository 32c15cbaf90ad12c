"""Certify a policy on labelled problems: find the cheapest rate whose loss of accuracy is bounded.

    certify_runs(target, runs, is_correct, epsilon=.., delta=..) -> Certificate

Policies are tested from the highest rate down (Learn-then-Test). The gate of the certificate does
not learn, so a later run uses exactly the gate that was tested.

    python examples/certify.py
"""

import atts
from atts import Outcome
from atts.calibration import StoredScores
from atts.methods import LabelledRun, certified_gate, certify_runs, frozen_gate
from atts.testing import toy_problems

POLICY = atts.Policy(samples=2, early_stop="none")


def outcomes(method: str, rate: float = 0.2, stored: StoredScores | None = None) -> list[Outcome]:
    """Solve thirty labelled problems with the gate of the method.

    If `stored` is given, use a frozen gate instead, which ranks every chunk against these scores.
    """
    gate = frozen_gate(rate, stored) if stored is not None else None
    setup = atts.Setup(
        draft="scripted", target="scripted", method=method, rate=rate, gate=gate, policy=POLICY
    )
    results = list(atts.evaluate_sync(toy_problems(30, seed=1), setup).outcomes())
    return sorted(results, key=lambda outcome: outcome.problem.id)


def is_correct(outcome: Outcome) -> bool:
    """Return whether the answer of the vote equals the reference."""
    return outcome.answer == outcome.problem.answer


def main() -> None:
    """Run the method at two rates, certify the cheapest rate, and use the certified gate in a new
    run.
    """
    seen = [
        turn.score
        for o in outcomes("atts")
        for r in o.rollouts
        for turn in r.turns
        if turn.score is not None
    ]
    stored = StoredScores.of(seen)
    runs = [LabelledRun("split", rate, outcomes("atts", rate, stored)) for rate in (0.4, 0.2)]
    certificate = certify_runs(outcomes("target-only"), runs, is_correct, epsilon=0.1, delta=0.1)
    print(certificate.guarantee)
    if certificate.chosen is not None:
        print("deploy:", certified_gate(certificate, stored).promise[0])


if __name__ == "__main__":
    main()
