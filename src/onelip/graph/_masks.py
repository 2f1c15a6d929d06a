"""Boolean masks as indices: the shape of `x[:, mask]` depends on values, which a trace does not have.

Example: with mask = [True, False, True], `x[:, mask]` is `x[:, [0, 2]]`. If a forward indexes with masks, it is run
once on numbers to count the entries that each mask picks, here 2. Then it is traced with the operation `onelip::places`
in place of each mask, which returns that many indices. The reader computes the indices of a constant mask, and checks
their number. It refuses a mask that depends on the input.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

PLACES = "onelip.places.default"


class Masks(TorchFunctionMode):
    """Counts the entries that masks pick; in a trace, where they have no values, replaces masks by their places.

    Args:
        counts: the number of entries that each mask picks, in order; None to count them.
    """

    def __init__(self, counts: list[int] | None = None) -> None:
        super().__init__()
        self.counts = counts
        self.found: list[int] = []
        self.is_used = False
        self._depth = 0  # of layers that are single calls, whose masks the graph does not show

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            given = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = [part for one in given for part in self._places(one, args[0])]
            args = (args[0], tuple(index), *args[2:])
        elif func in (Tensor.nonzero, torch.nonzero) and args[0].dtype == torch.bool and self.counts is not None:
            places = self._places(args[0], args[0])
            return tuple(places) if kwargs.get("as_tuple") else torch.stack(places, 1)
        elif func in (Tensor.nonzero, torch.nonzero):
            self._places(args[0], args[0])
        return func(*args, **kwargs)

    def _places(self, index: Any, x: Tensor) -> list[Any]:
        if isinstance(index, list) and index and all(isinstance(flag, bool) for flag in index):
            index = torch.tensor(index, device=x.device)
        if not isinstance(index, Tensor) or index.dtype != torch.bool or index.dim() == 0 or self._depth:
            return [index]
        self.is_used = True
        is_trace = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if not is_trace:
            if self.counts is None:
                self.found.append(int(index.sum()))
            return [index]
        if not self.counts:
            return [index]
        return list(_operation()(index, self.counts.pop(0)).unbind(1))

    def count(self, model: nn.Module, example: Tensor, leaves: list[str]) -> list[int]:
        """Run a model and count the entries that each of its masks picks, except in layers that are single calls."""
        for path in leaves:
            leaf = model.get_submodule(path)
            leaf.register_forward_pre_hook(lambda *_: self._go(1))
            leaf.register_forward_hook(lambda *_: self._go(-1))
        with self:
            model(example)
        return self.found

    def _go(self, by: int) -> None:
        self._depth += by


@functools.cache
def _operation() -> Callable[[Tensor, int], Tensor]:
    def places(mask: Tensor, count: int) -> Tensor:
        found = mask.nonzero()
        if len(found) != count:
            raise ValueError(f"expected a mask that picks {count} entries, got one that picks {len(found)}")
        return found

    def shape_of(mask: Tensor, count: int) -> Tensor:
        return mask.new_empty((count, mask.dim()), dtype=torch.long)

    types = {"mask": Tensor, "count": int, "return": Tensor}
    places.__annotations__, shape_of.__annotations__ = types, types
    op = torch.library.custom_op("onelip::places", places, mutates_args=())
    op.register_fake(shape_of)
    return torch.ops.onelip.places.default
