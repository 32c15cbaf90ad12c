"""From text to verdicts, from verdicts to numbers one can defend; knows no engine."""

from atts.evaluators.columns import Columns
from atts.evaluators.costs import Cost, Latency, ModelShape, cost, latency, total_usage
from atts.evaluators.datasets import Dataset, LoadOptions, digest, load_dataset, overlap
from atts.evaluators.equivalence import SecondOpinion, equivalent
from atts.evaluators.extraction import Extraction, Extractor, extract, extraction
from atts.evaluators.grading import GradedRecord, Tally, grade, reference
from atts.evaluators.grouping import group
from atts.evaluators.intervals import Estimate, bayesian_estimate, benchmark_estimate, mean_estimate, nested_bootstrap
from atts.evaluators.majority import Votes, maj_at_k, votes, weighted_maj_at_k, winners
from atts.evaluators.metrics import Counts, avg_at_n, count, g_pass_at_k, mean_g_pass_at_k, pass_at_k, pass_hat_k, rate
from atts.evaluators.paired import (
    Comparison,
    McNemar,
    align,
    compare_runs,
    mcnemar,
    problems_needed,
    single_answer_deviation,
)
from atts.evaluators.scorecard import Coverage, Samples, Scorecard, coverage, score
from atts.evaluators.selection import Selection, select
from atts.evaluators.slow import SlowLimits, SlowPath, aequivalent
from atts.evaluators.sources import BENCHMARKS, Benchmark
from atts.evaluators.verdict import Limits, Status, Verdict

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "Columns",
    "Comparison",
    "Cost",
    "Counts",
    "Coverage",
    "Dataset",
    "Estimate",
    "Extraction",
    "Extractor",
    "GradedRecord",
    "Latency",
    "Limits",
    "LoadOptions",
    "McNemar",
    "ModelShape",
    "Samples",
    "Scorecard",
    "SecondOpinion",
    "Selection",
    "SlowLimits",
    "SlowPath",
    "Status",
    "Tally",
    "Verdict",
    "Votes",
    "aequivalent",
    "align",
    "avg_at_n",
    "bayesian_estimate",
    "benchmark_estimate",
    "compare_runs",
    "cost",
    "count",
    "coverage",
    "digest",
    "equivalent",
    "extract",
    "extraction",
    "g_pass_at_k",
    "grade",
    "group",
    "latency",
    "load_dataset",
    "maj_at_k",
    "mcnemar",
    "mean_estimate",
    "mean_g_pass_at_k",
    "nested_bootstrap",
    "overlap",
    "pass_at_k",
    "pass_hat_k",
    "problems_needed",
    "rate",
    "reference",
    "score",
    "select",
    "single_answer_deviation",
    "total_usage",
    "votes",
    "weighted_maj_at_k",
    "winners",
]
