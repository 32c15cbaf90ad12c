"""What lets other harnesses drive this project; each harness has a module that needs its package."""

from atts.adapters.answering import Answering, Reply, ReplyKind

__all__ = ["Answering", "Reply", "ReplyKind"]
