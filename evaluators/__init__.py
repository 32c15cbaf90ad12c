"""Evaluation: extraction of answers, verdicts on answers, rates with intervals, and benchmarks."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atts.evaluators.answers import Extraction, extract, extraction, unmarked
    from atts.evaluators.datasets.arithmetic import Exercise, exercises
    from atts.evaluators.datasets.loading import (
        Dataset,
        Selection,
        cached_snapshot,
        load_dataset,
        select,
    )
    from atts.evaluators.datasets.tables import (
        BENCHMARKS,
        Benchmark,
        Columns,
        LoadOptions,
        find_benchmark,
        json_lines,
    )
    from atts.evaluators.equivalence.grouping import group, takes_long
    from atts.evaluators.equivalence.pairs import equivalent
    from atts.evaluators.grading import (
        BadRecord,
        GradedRecord,
        GradeTally,
        grade,
        grade_all,
        judge,
        read_records,
        reference,
    )
    from atts.evaluators.metrics.intervals import (
        Estimate,
        accuracy_estimate,
        mean_estimate,
        share_estimate,
    )
    from atts.evaluators.metrics.paired import (
        Power,
        VarianceSplit,
        difference_spread,
        paired_power,
        variance_split,
    )
    from atts.evaluators.metrics.rates import (
        LabelledChunk,
        gain_over_coin,
        within_question_auroc,
    )
    from atts.evaluators.programs import (
        Case,
        ProgramRun,
        ProgramTests,
        ProgramVotes,
        check_confinement,
        find_program,
        run_program,
    )
    from atts.evaluators.verdict import RULES, Limits, Status, Verdict

    # isort: off
    from atts.evaluators.metrics.paired import (
        Comparison, ConfidenceSequence, McNemar, Sequential, compare_in_order, compare_runs, holm, mcnemar,
        problems_needed,
    )  # fmt: skip
    from atts.evaluators.metrics.rates import (
        Counts, Samples, Scorecard, Votes, answer_classes, avg_at_n, count, g_pass_at_k, maj_at_k, pass_at_k,
        pass_hat_k, rate, samples_of, score, votes,
    )  # fmt: skip

_NAMES = {
    "datasets.arithmetic": "Exercise exercises",
    "datasets.loading": "Dataset Selection cached_snapshot load_dataset select",
    "datasets.tables": "BENCHMARKS Benchmark Columns LoadOptions find_benchmark json_lines",
    "equivalence.grouping": "group takes_long",
    "equivalence.pairs": "equivalent",
    "answers": "Extraction extract extraction unmarked",
    "grading": "BadRecord GradeTally GradedRecord grade grade_all judge read_records reference",
    "metrics.intervals": "Estimate accuracy_estimate mean_estimate share_estimate",
    "metrics.paired": "Comparison ConfidenceSequence McNemar Sequential compare_in_order "
    "Power VarianceSplit compare_runs difference_spread holm mcnemar paired_power problems_needed "
    "variance_split",
    "metrics.rates": "Counts LabelledChunk Samples Scorecard Votes answer_classes avg_at_n count "
    "g_pass_at_k gain_over_coin maj_at_k pass_at_k pass_hat_k rate samples_of score votes "
    "within_question_auroc",
    "programs": "Case ProgramRun ProgramTests ProgramVotes check_confinement find_program run_program",
    "verdict": "Limits RULES Status Verdict",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = [
    "BENCHMARKS", "BadRecord", "Benchmark", "Case", "Columns", "Comparison", "ConfidenceSequence", "Counts", "Dataset",
    "Estimate", "Exercise", "Extraction", "GradeTally", "GradedRecord", "LabelledChunk", "Limits",
    "LoadOptions", "McNemar", "Power", "ProgramRun", "ProgramTests", "ProgramVotes",
    "RULES", "Samples", "Scorecard", "Selection", "Sequential", "Status",
    "VarianceSplit", "Verdict", "Votes", "accuracy_estimate", "answer_classes", "avg_at_n", "cached_snapshot", 
    "check_confinement",
    "compare_in_order", "compare_runs", "count", "difference_spread", "equivalent", "exercises", "extract",
    "extraction", "find_benchmark", "find_program", "g_pass_at_k", "gain_over_coin", "grade", "grade_all", "group", "holm",
    "json_lines", "judge", "load_dataset", "maj_at_k", "mcnemar", "mean_estimate", "paired_power", "pass_at_k",
    "pass_hat_k", "problems_needed", "rate", "read_records", "reference", "run_program", "samples_of", "score", "select",
    "share_estimate", "takes_long", "unmarked", "variance_split", "votes", "within_question_auroc",
]  # fmt: skip


# Type checkers must not see this `__getattr__`. It would accept every name, so they would no longer
# report misspelt names.
if not TYPE_CHECKING:

    def __getattr__(name):
        """Import the module of a public name when the name is first used, so that grading does not
        load numpy.
        """
        if name not in _HOME:
            raise AttributeError(f"module 'atts.evaluators' has no attribute {name!r}")
        return getattr(import_module(f"atts.evaluators.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
