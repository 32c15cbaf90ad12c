"""SmartSpec: proposers of tokens, and the choice of as many proposed tokens as save time."""
