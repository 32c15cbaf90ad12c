"""SmartSpec: proposers of tokens, and rules that propose only as many tokens as save time."""
