"""The command line, which parses arguments, calls the API and prints results."""

from atts.cli.app import run

__all__ = ["run"]
