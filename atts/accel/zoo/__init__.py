"""BlockLLM: models that share blocks are stored together and served by one loop, each shared block
once.
"""
