"""Ways to spend tokens on one problem, against the engine protocol."""
