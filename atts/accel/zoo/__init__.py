"""BlockLLM: models stored and served by the blocks that they share."""
