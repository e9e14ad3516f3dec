"""Advantage estimators, one file each, and their registry. Each is a pure function of
`types.AdvantageInputs`; what the group estimators share is in `groups`, whitening in `whitening`.
Imported by `learning` and above; imports only `practicum.algorithms.segments`.
"""
