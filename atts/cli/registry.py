"""Every command, one line each: its name, where its code lives, what it is for."""

from typing import NamedTuple


class Entry(NamedTuple):
    """A command or group of commands; `module` is imported only when it is called, `attribute` found in it."""

    module: str
    attribute: str
    help: str


COMMANDS: dict[str, Entry] = {
    "calibration": Entry("atts.cli.calibration", "app", "Fit, check, import and replay calibrations."),
    "compare": Entry("atts.cli.compare", "compare", "Compare two runs problem by problem, costs as ratios."),
    "config": Entry("atts.cli.config", "app", "Show the configuration, and who set what."),
    "datasets": Entry("atts.cli.datasets", "app", "List datasets, or show what is in one."),
    "eval": Entry("atts.cli.eval", "evaluate", "Evaluate a method on a dataset: the main job."),
    "grade": Entry("atts.cli.grade", "grade", "Grade answers against references."),
    "merge": Entry("atts.cli.merge", "merge", "Make one run of the shards of an evaluation."),
    "plan": Entry("atts.cli.plan", "plan", "Advise what to spend on a problem, from recorded runs."),
    "probe": Entry("atts.cli.probe", "probe", "Say what a server can do for a run."),
    "replay": Entry("atts.cli.replay", "replay", "Run another policy over a recorded run, without a model."),
    "report": Entry("atts.cli.report", "report", "Write the report of a run."),
    "solve": Entry("atts.cli.solve", "solve", "Solve one problem and show the reasoning."),
    "trace": Entry("atts.cli.trace", "trace", "Write a run's task graph as a trace for Perfetto."),
}
