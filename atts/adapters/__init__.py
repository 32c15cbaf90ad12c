"""Adapters for other evaluation harnesses: inspect_ai and lm_eval."""

from atts.adapters.replies import Reply, ReplyKind

__all__ = ["Reply", "ReplyKind"]
