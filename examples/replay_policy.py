"""Replay a recorded run with other policies, without a model: they read the recorded scores."""

import tempfile
from pathlib import Path

import atts
from atts.testing import toy_problems


def main() -> None:
    """Record a run, then replay the run at four rates, and with fewer rollouts."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        setup = atts.Setup(
            draft="scripted", target="scripted", rate=0.2, policy=atts.Policy(samples=4)
        )
        atts.evaluate_sync(toy_problems(12), setup, directory=directory)
        for rate in (0.1, 0.2, 0.3, 0.4):
            result = atts.replay(directory, rate=rate)
            share = sum(decision.off_policy for decision in result.decisions) / len(
                result.decisions
            )
            print(
                f"rate {rate}: realised {result.replayed.rate}, {100 * share:.0f} % of decisions off-policy"
            )
        print(f"accuracy with two rollouts: {atts.replay(directory, samples=2).replayed.accuracy}")


if __name__ == "__main__":
    main()
