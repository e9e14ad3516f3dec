"""torch's attention, whose threads on a CPU compute small products each by itself.

The operator is parallel over rows and heads. MKL would start threads again for each product in there, which
takes longer than the product. The numbers are the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from practicum.compat.torch import use_one_mkl_thread, use_own_mkl_threads


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Compute torch's function of this name."""
    if query.device.type != "cpu" or torch.get_num_threads() == 1:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    use_one_mkl_thread()
    try:
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    finally:
        use_own_mkl_threads()
    if out.grad_fn is not None:
        out.grad_fn.register_prehook(use_one_mkl_thread)
        out.grad_fn.register_hook(use_own_mkl_threads)
    return out
