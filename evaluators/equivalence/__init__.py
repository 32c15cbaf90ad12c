"""Says whether two trees are the same answer under the written policy, in bounded time."""
