"""Keep autocast away from what a proof rests on."""

from contextlib import AbstractContextManager, nullcontext

import torch


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """A context in which matrix products run in the precision of their operands, whatever autocast says outside.

    A Gram matrix multiplied in bfloat16 underestimates the norm by parts in a thousand; the layer would not be
    1-Lipschitz any more.
    """
    # Devices without autocast (meta) have none to keep away.
    return torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else nullcontext()
