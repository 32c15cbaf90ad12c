"""BlockLLM: models that share blocks; a shared block is stored once, and computed once for all
models.
"""
