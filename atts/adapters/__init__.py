"""Adapters for evaluation and training harnesses: inspect_ai, lm_eval, slime and verifiers."""

from atts.adapters.replies import Reply, ReplyKind, question_of

__all__ = ["Reply", "ReplyKind", "question_of"]
