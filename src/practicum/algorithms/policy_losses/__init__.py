"""Policy losses, one file each, and their registry. Each is a pure function of `types.PolicyInputs`
that gives a loss for every token; `practicum.algorithms.aggregation` makes one number of them. What
they share is in `ratios`. Imported by `learning` and above; imports only
`practicum.algorithms.segments`.
"""
