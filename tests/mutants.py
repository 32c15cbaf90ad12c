"""Faults planted in the source one at a time, each with the tests that must fail.

`scripts/test mutants` plants each fault in a temporary copy of the source. A fault replaces a line
that occurs once in its file by another line.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault: `old` becomes `new` in `file`; `tests` are files, folders or tests, separated by
    spaces.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


def _table(file: str, tests: str, *lines: str) -> list[Mutant]:
    """Return the faults of a file, each given as its old and its new line."""
    pairs = zip(lines[::2], lines[1::2], strict=True)
    return [
        Mutant(f"{file}:{number}", file, old, new, tests)
        for number, (old, new) in enumerate(pairs, start=1)
    ]


BLIND_SPOTS = [
    Mutant(
        "weighted votes decided by counts",
        "pipelines/votes.py",
        "heaviest_first = sorted(answers, key=lambda label: -weights[label])",
        "heaviest_first = sorted(answers, key=lambda label: -counts[label])",
        "tests/pipelines/test_votes.py",
    ),
    Mutant(
        "repair keeps the whole chunk and has no room",
        "pipelines/rollout.py",
        "part = first_tokens(chunk, proposal.first_rejected, builder.draft)",
        "part = first_tokens(chunk, chunk.tokens, builder.draft)",
        "tests/pipelines/test_rejection.py",
    ),
    Mutant(
        "a turn's pool answers below its minimum",
        "calibration/pools.py",
        "if pool is not None and len(pool) >= self._minimum:",
        "if pool is not None:",
        "tests/calibration/test_pools.py",
    ),
    Mutant(
        "a merged controller forgets the other's level",
        "calibration/controllers.py",
        'self._level += state["level"] - self._rate',
        'self._level += self._rate - state["level"]',
        "tests/calibration/test_state.py tests/calibration/test_online.py",
    ),
    Mutant(
        "a late failure takes a recovered replica down",
        "atts/servers/pool.py",
        "if member.checks == checks:",
        "if True:",
        "tests/servers/test_pool.py",
    ),
    Mutant(
        "the exit is read one row early",
        "atts/accel/overlap/mirror.py",
        "adapted = self._adapter(x[[at for at, _, _ in heard_rows]], self._eps)",
        "adapted = self._adapter(x[[max(0, at - 1) for at, _, _ in heard_rows]], self._eps)",
        "tests/local/test_exits.py",
    ),
]
"""Faults that no test caught when they were first planted; the listed tests must catch them now."""

OTHERS = [
    *_table(
        "calibration/certificates.py",
        "tests/calibration/test_certificates.py",
        "capital = np.cumsum(np.log1p(bets * (epsilon - array)))",
        "capital = np.cumsum(np.log1p(bets * (epsilon + array)))",
        "if needed is not None and chosen is None:",
        "if needed is None and chosen is None:",
    ),
    *_table(
        "calibration/conformal.py",
        "tests/calibration/test_conformal.py",
        "if groups < 2 or total == groups:",
        "if groups < 2 or total != groups:",
    ),
    *_table(
        "calibration/pools.py",
        "tests/calibration/test_pools.py",
        "if question is None or not self._prior:",
        "if question is not None or not self._prior:",
    ),
    *_table(
        "calibration/guarantees.py",
        "tests/calibration",
        "side = max(self.rate, 1 - self.rate)",
        "side = max(self.rate, 1 + self.rate)",
    ),
    *_table(
        "calibration/online.py",
        "tests/calibration/test_replay.py",
        'if problem.what != "score":',
        'if problem.what == "score":',
    ),
    *_table(
        "evaluators/equivalence/probing.py",
        "tests/evaluators/test_algebra.py tests/evaluators/test_equivalent.py "
        "tests/evaluators/test_values.py tests/evaluators/test_adversarial.py",
        'if each.kind == "relation" or (is_function and each.text in ("max", "min")):',
        'if each.kind == "relation" or (is_function and each.text not in ("max", "min")):',
    ),
    *_table(
        "evaluators/metrics/wilson.py",
        "tests/evaluators/test_intervals.py",
        "half = reach / scale * math.sqrt(mean * (1 - mean) / n + reach * reach / (4 * n * n))",
        "half = reach / scale * math.sqrt(mean * (1 - mean) / n - reach * reach / (4 * n * n))",
    ),
    *_table(
        "evaluators/equivalence/compare.py",
        "tests/evaluators/test_equivalent.py tests/evaluators/test_meanings.py",
        "return self.ruled(rule, values[0] == values[1])",
        "return self.ruled(rule, values[0] != values[1])",
    ),
    *_table(
        "evaluators/equivalence/views.py",
        "tests/evaluators/test_policies.py tests/evaluators/test_grading_policies.py",
        'is_rounded = any(each.kind == "number" and set(each.text) & set(".eE") for each in gold.walk())',
        'is_rounded = any(each.kind != "number" and set(each.text) & set(".eE") for each in gold.walk())',
    ),
    *_table(
        "evaluators/equivalence/worker.py",
        "tests/evaluators/test_algebra.py tests/evaluators/test_values.py",
        'if kind in ("union", "setminus"):',
        'if kind not in ("union", "setminus"):',
    ),
    *_table(
        "evaluators/answers.py",
        "tests/evaluators/test_extract.py",
        "if mark is None:",
        "if mark is not None:",
    ),
    *_table(
        "pipelines/builder.py",
        "tests/pipelines/test_gates.py tests/pipelines/test_rejection.py",
        "self._unassigned = max(0, self._unassigned - self._ahead.tokens)",
        "self._unassigned = max(0, self._unassigned + self._ahead.tokens)",
        "answers = others if answer is None else [*others, answer]",
        "answers = others if answer is not None else [*others, answer]",
        "start = self._positions.setdefault((start, chunk.target_ids), len(self._positions) + 1)",
        "start = self._positions.setdefault((start, chunk.target_ids), len(self._positions) - 1)",
    ),
    *_table(
        "pipelines/scores.py",
        "tests/pipelines/test_scores.py",
        'if isinstance(rule, ScoreRule) and rule.kind == "draft":',
        'if isinstance(rule, ScoreRule) and rule.kind != "draft":',
    ),
    *_table(
        "pipelines/policy.py",
        "tests/pipelines tests/cli/test_config.py",
        "if value is not None and value < floor:",
        "if value is not None and value > floor:",
    ),
    *_table(
        "pipelines/votes.py",
        "tests/pipelines/test_votes.py",
        "for y in range(max(0, first + x - rival), remaining - x + 1):",
        "for y in range(max(1, first + x - rival), remaining - x + 1):",
        "value += math.lgamma(count + pseudo) - math.lgamma(pseudo) - math.lgamma(count + 1)",
        "value += math.lgamma(count + pseudo) - math.lgamma(pseudo) - math.lgamma(count + 2)",
        "return bool(current.answers) and current.lead > remaining * heaviest",
        "return bool(current.answers) and current.lead >= remaining * heaviest",
    ),
    *_table(
        "pipelines/rollout.py",
        "tests/pipelines/test_votes.py tests/pipelines/test_rejection.py",
        'if self.policy.early_stop == "none" or remaining == 0:',
        'if self.policy.early_stop != "none" or remaining == 0:',
    ),
    *_table(
        "atts/graph/graph.py",
        "tests/graph",
        "others = [node for node in self.frontier if node not in span.after]",
        "others = [node for node in self.frontier if node in span.after]",
        "ready = queued if self._ready is None else self._ready",
        "ready = queued if self._ready is not None else self._ready",
        "span.waited += released - span.ended",
        "span.waited += released + span.ended",
    ),
    *_table(
        "atts/graph/timing.py",
        "tests/graph",
        "compute = node.ended - node.started",
        "compute = node.ended - node.queued",
        "if other.sample != node.sample:",
        "if other.sample == node.sample:",
    ),
    *_table(
        "atts/journal/lines.py",
        "tests/journal/test_writer.py tests/journal/test_reader.py",
        'options.durability == "interval" and now - self._synced_at >= options.sync_seconds',
        'options.durability == "interval" and now - self._synced_at < options.sync_seconds',
        "self.session = past.session + 1",
        "self.session = past.session",
    ),
    *_table(
        "atts/journal/lines.py",
        "tests/journal",
        "if isinstance(event, Sampled | Scored) and event.span is not None:",
        "if isinstance(event, Sampled | Scored) and event.span is None:",
        "if kind in kinds or _SECOND.get(kind) in kinds:",
        "if kind in kinds or _SECOND.get(kind) not in kinds:",
        "if self._kinds is None or type(part) in self._kinds or type(part) is SessionOpened:",
        "if self._kinds is None or type(part) in self._kinds or type(part) is not SessionOpened:",
    ),
    *_table(
        "atts/run/result.py",
        "tests/run/test_abstaining.py",
        "if outcome.answer is None or threshold is None or outcome.agreement >= threshold - 1e-9:",
        "if outcome.answer is None or threshold is None or outcome.agreement < threshold - 1e-9:",
    ),
    *_table(
        "atts/run/calls.py",
        "tests/run/test_run.py",
        "if len(ids) > request.max_tokens:",
        "if len(ids) > request.max_tokens + 1:",
        'may_lack = spec.logprobs == "none" or request.logprobs == "unneeded"',
        'may_lack = spec.logprobs == "none" or request.logprobs != "unneeded"',
    ),
    *_table(
        "atts/run/merging.py",
        "tests/cli/test_recorded_runs.py",
        "missing = sorted(set(range(1, count + 1)) - set(numbers))",
        "missing = sorted(set(range(1, count)) - set(numbers))",
    ),
    *_table(
        "atts/run/calls.py",
        "tests/run/test_resume_exact.py tests/run/test_censored.py tests/run/test_decisions_left.py",
        "return left / (left + self._decided)",
        "return left / (left + self._decided + 1)",
    ),
    *_table(
        "atts/run/evaluation.py",
        "tests/run/test_run.py tests/run/test_resume.py",
        'is_left = not self._state.is_over(problem.id) or self._plan.recall == "recorded"',
        'is_left = not self._state.is_over(problem.id) or self._plan.recall != "recorded"',
    ),
    *_table(
        "atts/servers/client.py",
        "tests/hostile/test_servers.py tests/servers/test_faults.py tests/servers/test_client.py "
        "tests/hostile/test_replies.py tests/servers/test_engine.py",
        "room = self.most + 1 - len(self.text)",
        "room = 2 * self.most + 1 - len(self.text)",
        'if options.proxy == "never":',
        'if options.proxy != "never":',
        "if None in values:",
        "if None not in values:",
    ),
    *_table(
        "atts/servers/dialect.py",
        "tests/servers/test_engine.py",
        "is_whole = len(sent) == length and None not in sent",
        "is_whole = len(sent) == length",
    ),
    *_table(
        "atts/servers/engine.py",
        "tests/servers/test_faults.py::test_other_weights_under_the_same_name_are_noticed_after_some_replies",
        "if self._unchecked >= self.options.recheck_requests:",
        "if self._unchecked > 4 * self.options.recheck_requests:",
    ),
    *_table(
        "atts/local/scheduler.py",
        "tests/local/test_engine.py tests/local/test_cache.py tests/local/test_naive.py",
        "if known > shared:",
        "if known < shared:",
    ),
    *_table(
        "atts/local/cache.py",
        "tests/local/test_cache.py tests/local/test_naive.py tests/local/test_engine.py",
        "step.scores[len(step.ids) - own :] = left[len(left) - own :]",
        "step.scores[len(step.ids) - own :] = left[:own]",
    ),
    *_table(
        "atts/local/device_steps.py",
        "tests/local/test_multi_step.py tests/local/test_batch.py tests/local/test_graphs.py",
        "return 1 << max(0, count - 1).bit_length()",
        "return 1 << max(0, count + 1).bit_length()",
    ),
    *_table(
        "atts/local/model_config.py",
        "tests/local/test_configuration.py",
        "if part != 1.0 and not FAMILIES[config.model_type].may_turn_parts:",
        "if part == 1.0 and not FAMILIES[config.model_type].may_turn_parts:",
    ),
    *_table(
        "atts/accel/speculate/goodput.py",
        "tests/speculation/test_goodput.py",
        "sum([proposed for _, proposed, _ in rounds]) / self._total - self._coverage",
        "sum([proposed for _, proposed, _ in rounds]) / self._total + self._coverage",
    ),
    *_table(
        "atts/accel/speculate/proposers.py",
        "tests/speculation/test_proposals.py",
        "[(text, end) for match_length, text, end in places if match_length == length],",
        "[(text, end) for match_length, text, end in places if match_length != length],",
    ),
    *_table(
        "atts/accel/zoo/zoo.py",
        "tests/blocks/test_zoo.py",
        "return 1 - self.stored / self.apart if self.apart else 0.0",
        "return self.stored / self.apart if self.apart else 0.0",
    ),
    *_table(
        "atts/accel/zoo/many_models.py",
        "tests/blocks/test_chains.py tests/blocks/test_shared_ranges.py",
        "units <= span.start",
        "units < span.start",
    ),
    *_table(
        "atts/core.py",
        "tests/analysis/test_numbers.py",
        "if whole is not chunk and whole.author == chunk.author",
        "if whole is not chunk and whole.author != chunk.author",
    ),
    *_table(
        "atts/analysis/reports/rate_control.py",
        "tests/analysis/test_numbers.py tests/analysis/test_calibration_report.py",
        "if columns.turns[place] == 0 and math.isfinite(nonconformity):",
        "if columns.turns[place] != 0 and math.isfinite(nonconformity):",
    ),
    *_table(
        "atts/analysis/sweeps.py",
        "tests/analysis/test_sweep.py",
        'return tuple(point for point in self.points if point.kind == "reference")',
        'return tuple(point for point in self.points if point.kind != "reference")',
    ),
    *_table(
        "atts/api/keys.py",
        "tests/cli/test_config.py",
        "elif isinstance(value, str) and get_origin(kind) is tuple:",
        "elif isinstance(value, str) and get_origin(kind) is not tuple:",
    ),
    *_table(
        "atts/api/sweeping.py",
        "tests/analysis/test_pilot.py",
        '\n        if result.exit_code or result.status != "finished":',
        '\n        if result.exit_code or result.status == "finished":',
    ),
    *_table(
        "atts/cli/evaluations.py",
        "tests/cli/test_config.py tests/cli/test_budgets.py",
        "if role is None or role in estimate.roles:",
        "if role is not None or role in estimate.roles:",
    ),
    *_table(
        "atts/cli/recorded_runs.py",
        "tests/cli/test_recorded_runs.py",
        'if str(out) == "-":',
        'if str(out) != "-":',
    ),
    *_table(
        "atts/testing/toy_model.py",
        "tests/testing",
        "missing = wanted - math.fsum(weights)",
        "missing = wanted + math.fsum(weights)",
    ),
    *_table(
        "atts/testing/conformance.py",
        "tests/testing/test_conformance.py",
        'silent = not logprobs and probe.engine.spec.logprobs == "none"',
        'silent = not logprobs and probe.engine.spec.logprobs != "none"',
    ),
    *_table(
        "atts/models/chat_templates.py",
        "tests/hostile/test_models.py tests/local/test_model_folder.py",
        "environment = {name: os.environ[name] for name in _KEPT if name in os.environ}",
        "environment = dict(os.environ)",
    ),
    *_table(
        "atts/models/folders.py",
        "tests/local/test_configuration.py tests/local/test_model_folder.py tests/hostile/test_models.py",
        "if any(type(end) is not int or end < 0 for end in ids):",
        "if any(type(end) is not int for end in ids):",
    ),
    *_table(
        "atts/models/stored_blocks.py",
        "tests/blocks/test_zoo.py",
        "if found != digest:",
        "if found == digest:",
    ),
    *_table(
        "atts/sampling.py",
        "tests/test_distributions.py",
        "powers = count * math.log(chance) + (enough - count) * math.log1p(-chance)",
        "powers = count * math.log(chance) - (enough - count) * math.log1p(-chance)",
    ),
    *_table(
        "atts/core.py",
        "tests/run/test_run.py",
        "target_tokens=self.target_tokens + other.target_tokens,",
        "target_tokens=self.target_tokens,",
    ),
    *_table(
        "atts/concurrency.py",
        "tests/graph/test_concurrency.py",
        "return 0 if self.slots is None else self.slots - int(self.free_slots)",
        "return 0 if self.slots is None else self.slots + int(self.free_slots)",
    ),
]

MUTANTS = [*BLIND_SPOTS, *OTHERS]

SURVIVORS = {
    "evaluators/equivalence/probing.py:1": "the points around max and min are only tried in addition",
    "atts/servers/client.py:1": "a reply is measured again when it is whole; only memory differs",
}
"""Faults that no test notices, with the reason why that is accepted."""
