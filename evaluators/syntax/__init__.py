"""The syntax of answers: text is cleaned, tokenised and parsed into a small tree, never executed."""
