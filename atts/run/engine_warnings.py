"""Warnings about open engines: contexts that are too short, models that are too slow."""

from __future__ import annotations

from collections.abc import Iterator

from atts.concurrency import usable_cores
from atts.run.plan import Plan

_ENDLESS = 1 << 40  # tokens of a context that cuts nothing
_FLOPS_PER_CORE = 2e10  # what a core is taken to compute in a second, to tell hours from minutes


def engine_warnings(plan: Plan, problems: int) -> Iterator[tuple[str, str]]:
    """The code of each warning, and its words."""
    yield from _short_contexts(plan)
    yield from _slow_models(plan, problems)


def _short_contexts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Models that hold less than a rollout may take, or than it would be given otherwise."""
    most = plan.policy.bounds().max_tokens
    usual = most if plan.within is None else plan.within(_ENDLESS).bounds().max_tokens
    if most < usual:
        spec = min((plan.draft.spec, plan.target.spec), key=lambda spec: spec.context_length)
        holds = f"the context of {spec.model} holds {spec.context_length:,} tokens, the problem among them"
        yield "context", f"{holds}: rollouts get {most:,} tokens and not {usual:,}"
    for spec in dict.fromkeys((plan.draft.spec, plan.target.spec)):
        if spec.context_length <= most:
            holds = f"the context of {spec.model} holds {spec.context_length:,} tokens, the problem among them"
            yield "context", f"{holds}: rollouts end there, not at max_tokens {most:,}"


def _slow_models(plan: Plan, problems: int) -> Iterator[tuple[str, str]]:
    """Models of this process that compute on a processor and would take hours to write all that
    they may.
    """
    tokens = plan.policy.bounds().max_tokens * plan.policy.samples * problems
    for engine in dict.fromkeys((plan.draft, plan.target)):
        kernel = str(getattr(engine, "kernel", "cuda"))
        spec = engine.spec
        hours = spec.flops_per_token * tokens / (_FLOPS_PER_CORE * usable_cores()) / 3600
        if "cuda" not in kernel.lower() and hours > 1:
            all_of_it = f"all that {problems} problems x {plan.policy.samples} rollouts may take"
            slow = f"{spec.model} computes on this machine's processor: {all_of_it} would need some {hours:,.0f} hours"
            yield "speed", f"{slow}; take fewer with --limit and --samples, or a server with a GPU"
