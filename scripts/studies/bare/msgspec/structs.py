"""Stand in for msgspec.structs, where structs are dataclasses."""

from dataclasses import asdict

__all__ = ["asdict"]
