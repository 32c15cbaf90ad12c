"""SmartSpec: proposers of tokens, and as many proposals as pay."""
