"""Operators of torch that are not public. Tested with torch 2.13.

Each is None where torch or the processor lacks it. Callers compute by public functions then.
"""

from __future__ import annotations

from typing import Any

import torch

TESTED = "2.13"

_HAS_ONEDNN = torch.backends.mkldnn.is_available() and (
    torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
)
onednn_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if _HAS_ONEDNN else None
onednn_pack: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None) if _HAS_ONEDNN else None
cpu_flash: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
cpu_flash_backward: Any = getattr(
    torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None
)
