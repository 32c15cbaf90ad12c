"""Finds the final answer in a reasoning text, whole or still growing."""
