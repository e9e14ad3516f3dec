"""Divergences of the student from a teacher, token by token: of distributions (`distributions`, over one
small file for each divergence) and of the sampled token's logprob (`sampled`). `registry` has them by name.
Pure functions; the gradient flows to the student alone. Imports torch, `practicum.algorithms.kl` and
`recipe.own_parts`; `learning` and above may import it.
"""
