"""Evaluation: answers out of texts, verdicts on answers, rates with intervals, and benchmark datasets."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atts.evaluators.answers.extraction import Extraction as Extraction
    from atts.evaluators.answers.extraction import Extractor as Extractor
    from atts.evaluators.answers.extraction import extract as extract
    from atts.evaluators.answers.extraction import extraction as extraction
    from atts.evaluators.datasets.arithmetic import Exercise as Exercise
    from atts.evaluators.datasets.arithmetic import exercises as exercises
    from atts.evaluators.datasets.columns import Columns as Columns
    from atts.evaluators.datasets.hub import cached_snapshot as cached_snapshot
    from atts.evaluators.datasets.loading import Dataset as Dataset
    from atts.evaluators.datasets.loading import LoadOptions as LoadOptions
    from atts.evaluators.datasets.loading import digest as digest
    from atts.evaluators.datasets.loading import load_dataset as load_dataset
    from atts.evaluators.datasets.loading import overlap as overlap
    from atts.evaluators.datasets.rows import json_lines as json_lines
    from atts.evaluators.datasets.selection import Selection as Selection
    from atts.evaluators.datasets.selection import select as select
    from atts.evaluators.datasets.sources import BENCHMARKS as BENCHMARKS
    from atts.evaluators.datasets.sources import Benchmark as Benchmark
    from atts.evaluators.datasets.sources import find_benchmark as find_benchmark
    from atts.evaluators.equivalence.fast import equivalent as equivalent
    from atts.evaluators.equivalence.grouping import group as group
    from atts.evaluators.grading import GradedRecord as GradedRecord
    from atts.evaluators.grading import GradeTally as GradeTally
    from atts.evaluators.grading import grade as grade
    from atts.evaluators.grading import judge as judge
    from atts.evaluators.grading import reference as reference
    from atts.evaluators.metrics.intervals import Estimate as Estimate
    from atts.evaluators.metrics.intervals import accuracy_estimate as accuracy_estimate
    from atts.evaluators.metrics.intervals import mean_estimate as mean_estimate
    from atts.evaluators.metrics.intervals import share_estimate as share_estimate
    from atts.evaluators.metrics.majority import Votes as Votes
    from atts.evaluators.metrics.majority import maj_at_k as maj_at_k
    from atts.evaluators.metrics.majority import votes as votes
    from atts.evaluators.metrics.majority import weighted_maj_at_k as weighted_maj_at_k
    from atts.evaluators.metrics.paired import Comparison as Comparison
    from atts.evaluators.metrics.paired import McNemar as McNemar
    from atts.evaluators.metrics.paired import compare_runs as compare_runs
    from atts.evaluators.metrics.paired import mcnemar as mcnemar
    from atts.evaluators.metrics.paired import problems_needed as problems_needed
    from atts.evaluators.metrics.rates import Counts as Counts
    from atts.evaluators.metrics.rates import avg_at_n as avg_at_n
    from atts.evaluators.metrics.rates import count as count
    from atts.evaluators.metrics.rates import g_pass_at_k as g_pass_at_k
    from atts.evaluators.metrics.rates import pass_at_k as pass_at_k
    from atts.evaluators.metrics.rates import pass_hat_k as pass_hat_k
    from atts.evaluators.metrics.rates import rate as rate
    from atts.evaluators.metrics.scorecard import Coverage as Coverage
    from atts.evaluators.metrics.scorecard import Samples as Samples
    from atts.evaluators.metrics.scorecard import SampleStatus as SampleStatus
    from atts.evaluators.metrics.scorecard import Scorecard as Scorecard
    from atts.evaluators.metrics.scorecard import answer_classes as answer_classes
    from atts.evaluators.metrics.scorecard import coverage as coverage
    from atts.evaluators.metrics.scorecard import samples_of as samples_of
    from atts.evaluators.metrics.scorecard import score as score
    from atts.evaluators.metrics.scorecard import status_of as status_of
    from atts.evaluators.metrics.sequential import ConfidenceSequence as ConfidenceSequence
    from atts.evaluators.metrics.sequential import Sequential as Sequential
    from atts.evaluators.metrics.sequential import compare_in_order as compare_in_order
    from atts.evaluators.verdict import Limits as Limits
    from atts.evaluators.verdict import Status as Status
    from atts.evaluators.verdict import Verdict as Verdict

_NAMES = {
    "answers.extraction": "Extraction Extractor extract extraction",
    "datasets.arithmetic": "Exercise exercises",
    "datasets.columns": "Columns",
    "datasets.hub": "cached_snapshot",
    "datasets.loading": "Dataset LoadOptions digest load_dataset overlap",
    "datasets.rows": "json_lines",
    "datasets.selection": "Selection select",
    "datasets.sources": "BENCHMARKS Benchmark find_benchmark",
    "equivalence.fast": "equivalent",
    "equivalence.grouping": "group",
    "grading": "GradeTally GradedRecord grade judge reference",
    "metrics.intervals": "Estimate accuracy_estimate mean_estimate share_estimate",
    "metrics.majority": "Votes maj_at_k votes weighted_maj_at_k",
    "metrics.paired": "Comparison McNemar compare_runs mcnemar problems_needed",
    "metrics.rates": "Counts avg_at_n count g_pass_at_k pass_at_k pass_hat_k rate",
    "metrics.scorecard": "Coverage SampleStatus Samples Scorecard answer_classes coverage samples_of score status_of",
    "metrics.sequential": "ConfidenceSequence Sequential compare_in_order",
    "verdict": "Limits Status Verdict",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


if not TYPE_CHECKING:  # a checker sees the imports above, so that it refuses a misspelt name

    def __getattr__(name):
        """Import a public name's module when the name is first used: graders need none of what metrics load."""
        if name not in _HOME:
            raise AttributeError(f"module 'atts.evaluators' has no attribute {name!r}")
        return getattr(import_module(f"atts.evaluators.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
