"""What would another rate have done? Recorded scores decide anew, without a model.

Decisions that differ from the record lead where the record does not; they are counted as
off-policy.

    python examples/replay_policy.py
"""

import tempfile
from pathlib import Path

import atts
from atts.testing import toy_problems


def main() -> None:
    """Record one run, replay it at four rates and with fewer rollouts."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        setup = atts.Setup(
            draft="scripted", target="scripted", rate=0.2, policy=atts.Policy(samples=4)
        )
        atts.evaluate_sync(toy_problems(12), setup, directory=directory)
        for rate in (0.1, 0.2, 0.3, 0.4):
            found = atts.replay(directory, rate=rate)
            share = sum(decision.off_policy for decision in found.decisions) / len(found.decisions)
            print(
                f"rate {rate}: realised {found.replayed.rate}, {share:.0%} of decisions off-policy"
            )
        print(f"two rollouts: {atts.replay(directory, samples=2).replayed.accuracy} right")


if __name__ == "__main__":
    main()
