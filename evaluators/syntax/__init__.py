"""Turns an answer's text into a small tree: cleaned, cut into tokens, parsed, never executed."""
