"""The data plane: fields, row identity, BatchRef, the Store protocol and stores, stages and plans.

Tensors are stored here and sent directly to the workers that need them. The controller holds only keys and
tags. `fields`, `keys`, `batch` and `stages` import no torch.
"""
