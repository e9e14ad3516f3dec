"""For the workers of `vllm serve`: they import this by --worker-extension-cls before they make the model."""

from __future__ import annotations

from practicum.engines.vllm.adapter_products import repair_products

repair_products()


class AdapterWorker:
    """What vLLM's worker is extended by: nothing but products of adapters that are right."""
