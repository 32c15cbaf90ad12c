"""Adapters for other evaluation harnesses: inspect_ai and lm_eval."""

from atts.adapters.replies import Reply, ReplyKind, question_of

__all__ = ["Reply", "ReplyKind", "question_of"]
