"""The data plane: fields, row identity, BatchRef, the Store protocol and stores, stages and plans.

Tensors live here and go straight to the worker that needs them; the controller holds keys and tags only.
`fields`, `keys`, `batch` and `stages` import no torch.
"""
