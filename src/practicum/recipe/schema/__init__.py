"""The recipe's sections as typed models: every key, its type, its default and a sentence about it."""
