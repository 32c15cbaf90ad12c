"""Adapters for other evaluation harnesses: inspect_ai and lm_eval."""

from atts.adapters.session import Reply, ReplyKind, SolverSession

__all__ = ["SolverSession", "Reply", "ReplyKind"]
