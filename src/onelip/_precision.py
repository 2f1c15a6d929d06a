"""Keep autocast away from what a proof rests on."""

import torch


def full_precision(device: torch.device) -> torch.autocast:
    """A context in which matrix products run in the precision of their operands, whatever autocast says outside.

    A Gram matrix multiplied in bfloat16 underestimates the norm by parts in a thousand; the layer would not be
    1-Lipschitz any more.
    """
    return torch.autocast(device.type, enabled=False)
