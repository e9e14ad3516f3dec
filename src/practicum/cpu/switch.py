"""The switch of all CPU kernels: PRACTICUM_CPU_KERNELS=off in the environment turns them off."""

from __future__ import annotations

import os

ENABLED = os.environ.get("PRACTICUM_CPU_KERNELS", "on").lower() not in ("off", "0", "false")
