"""OpenAI-compatible HTTP endpoint that serves a pair of models, or a single model, with hard caps
on the spending of each request.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from atts.concurrency import import_lock
from atts.serving.requests import POLICIES, VOTES, NamedPolicy, RequestError, SolveRequest
from atts.serving.service import ServeOptions, Service

if TYPE_CHECKING:
    from atts.serving.app import build_app, run_server
    from atts.serving.status import RunStatus, view_server

__all__ = [
    "POLICIES",
    "VOTES",
    "NamedPolicy",
    "RequestError",
    "RunStatus",
    "ServeOptions",
    "Service",
    "SolveRequest",
    "build_app",
    "run_server",
    "view_server",
]

# The module that defines each name; a module is imported when one of its names is used. `app` needs
# the packages of the extra `serve`.
_HOME = {
    "build_app": "atts.serving.app",
    "run_server": "atts.serving.app",
    "RunStatus": "atts.serving.status",
    "view_server": "atts.serving.status",
}


def __getattr__(name: str) -> Any:
    """Import a name of this package on first use, because most programs do not need the server."""
    if name not in _HOME:
        raise AttributeError(f"module 'atts.serving' has no attribute {name!r}")
    with import_lock:
        return getattr(import_module(_HOME[name]), name)
