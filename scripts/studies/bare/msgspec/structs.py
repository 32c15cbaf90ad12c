"""Replacement for msgspec.structs on machines without msgspec; structs are dataclasses."""

from dataclasses import asdict

__all__ = ["asdict"]
