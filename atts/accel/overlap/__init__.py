"""PEARL, SSD and Mirror-SD: a drafter that works while its target computes."""
