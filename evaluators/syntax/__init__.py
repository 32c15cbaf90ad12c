"""The syntax of answers: a text is cleaned, tokenised and parsed into a small tree, but never
executed.
"""
