"""The mathematics of training, one small file per algorithm: advantages, policy losses, value loss, KL,
aggregation, weights against the mismatch of engine and learner.

Pure functions of packed tensors. Only `kl.AdaptiveKl` has state. Imports torch, `practicum.errors` and, to
find a user's own, `recipe.own_parts`. Tensors are packed, with the shape suffixes of CONTRIBUTING: `_N` is
one entry per response token of the batch, `_M` one per sampled token. `session_N` says to which session
(0..S-1) a token belongs. The tokens of a session are in time order but need not be adjacent. `mask_N` is True
where the student sampled the token. What stands at other positions is never read, and results there are 0.
"""
