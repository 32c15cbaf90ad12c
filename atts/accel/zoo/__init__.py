"""BlockLLM: models that share blocks, which are parts of their weights; a shared block is stored
once, and computed once for all models.
"""
