"""Answer extraction from reasoning texts, whole or still growing."""
