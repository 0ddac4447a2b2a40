"""What, beside the weights and their format, decides a seeded answer: the engine's own arithmetic and what it runs on.

`VERSION` must be raised with every change after which a seeded or greedy request may answer otherwise: how draws are
addressed, the order of logits processing, the arithmetic of a packed format, a kernel.
"""

from __future__ import annotations

import torch

VERSION = 3


def numerics_of(device: torch.device) -> str:
    """A text that is the same exactly where the same weights give the same answers, as far as we can tell."""
    kind = device.type
    if kind == "cpu":
        machine = torch.backends.cpu.get_cpu_capability()
    else:
        machine = torch.cuda.get_device_name(device) if kind == "cuda" else ""
    return f"{VERSION}|torch {torch.__version__}|{kind}|{machine}"
