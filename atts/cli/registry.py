"""The table of commands: name, module and one line of help."""

from typing import NamedTuple


class Command(NamedTuple):
    """A command or group of commands; `module` is imported only when it is called, `attribute`
    found in it.
    """

    module: str
    attribute: str
    help: str


COMMANDS: dict[str, Command] = {
    "calibration": Command(
        "atts.cli.calibration", "app", "Fit, check, import and replay calibrations."
    ),
    "certify": Command("atts.cli.certify", "certify", "Certify runs against the target alone."),
    "compare": Command(
        "atts.cli.compare", "compare", "Compare two runs problem by problem, costs as ratios."
    ),
    "config": Command("atts.cli.config", "app", "Show the configuration, and who set what."),
    "datasets": Command("atts.cli.datasets", "app", "List datasets, or show what is in one."),
    "doctor": Command("atts.cli.doctor", "doctor", "Look at everything a long run depends on."),
    "eval": Command("atts.cli.eval", "evaluate", "Evaluate a method on a dataset: the main job."),
    "grade": Command("atts.cli.grade", "grade", "Grade answers against references."),
    "journal": Command(
        "atts.cli.journal",
        "app",
        "Check whether a run is whole, and save what is of one that is not.",
    ),
    "merge": Command("atts.cli.merge", "merge", "Make one run of the shards of an evaluation."),
    "pairs": Command(
        "atts.cli.pairs", "pairs", "List pairs of models, and the GPUs that hold them."
    ),
    "plan": Command(
        "atts.cli.plan", "plan", "Advise what to spend on a problem, from recorded runs."
    ),
    "probe": Command("atts.cli.probe", "probe", "Say what a server can do for a run."),
    "replay": Command(
        "atts.cli.replay", "replay", "Run another policy over a recorded run, without a model."
    ),
    "report": Command("atts.cli.report", "report", "Write the report of a run."),
    "runs": Command("atts.cli.runs", "runs", "List runs with their status and headline."),
    "solve": Command("atts.cli.solve", "solve", "Solve one problem and show the reasoning."),
    "sweep": Command(
        "atts.cli.sweep", "sweep", "Evaluate under many settings, and draw what accuracy costs."
    ),
    "trace": Command(
        "atts.cli.trace", "trace", "Write a run's task graph as a trace for Perfetto."
    ),
    "zoo": Command("atts.cli.zoo", "app", "Store many models by the blocks they share."),
}
