"""PEARL, SSD and Mirror-SD: three schemes in which the drafter works while the target computes."""
