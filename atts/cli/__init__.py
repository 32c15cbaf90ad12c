"""The command line: parse, call the API, print."""

from atts.cli.app import run

__all__ = ["run"]
