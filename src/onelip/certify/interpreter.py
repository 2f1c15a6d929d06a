"""Run a program as torch operations in float64: the check that a program is the network it was read from."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onelip.certify.program import Operation, Program, halves
from onelip.nn.groupsort import groupsort
from onelip.nn.maxmin import maxmin


@torch.no_grad()
def run_program(program: Program, images: Tensor) -> list[Tensor]:
    """The values of all nodes for float64 images (N, *shape); the last are the logits.

    Example:
        >>> nodes = (Operation("input", (), (2,)), Operation("relu", (0,), (2,)))
        >>> run_program(Program(nodes), torch.tensor([[-1.0, 2.0]]))[-1]
        tensor([[0., 2.]])
    """
    values = [images]
    for node in program.nodes[1:]:
        operands = [values[i] for i in node.inputs]
        value = _RUN[node.op](node, *operands)
        if value.shape[1:] != node.shape:
            raise RuntimeError(f"{node.title}: expected the shape {node.shape}, got {tuple(value.shape[1:])}")
        values.append(value)
    return values


def _conv(node: Operation, x: Tensor) -> Tensor:
    settings, dims = node.settings, len(node.weight.shape) - 2
    if settings["transposed"]:
        run = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
        padding = [left for left, _ in settings["padding"]]
        if settings["mode"] == "circular":
            # Pixel i reads x[i + left - d t], from i - right to i + left: in the wrapped x those are i to i + both.
            x = F.pad(x, [n for left, right in reversed(settings["padding"]) for n in (right, left)], mode="circular")
            padding = [left + right for left, right in settings["padding"]]
        return run(
            x,
            node.weight,
            node.bias,
            settings["stride"],
            padding,
            settings["output_padding"],
            settings["groups"],
            settings["dilation"],
        )
    amounts = [n for pair in reversed(settings["padding"]) for n in pair]
    if any(amounts):
        x = F.pad(x, amounts, mode="circular" if settings["mode"] == "circular" else "constant")
    run = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    return run(x, node.weight, node.bias, settings["stride"], 0, settings["dilation"], settings["groups"])


def _potential(node: Operation, x: Tensor) -> Tensor:
    forth, back = halves(node)
    return x - 2 * _conv(back, _conv(forth, x).clamp(min=0))


def _concatenate(node: Operation, x: Tensor) -> Tensor:
    kernel = node.settings["kernel"]
    for axis, k in enumerate(kernel):
        x = x.unflatten(2 + 2 * axis, (-1, k))  # (n, c, h/k, k, ...)
    dims = len(kernel)
    offsets, positions = [3 + 2 * i for i in range(dims)], [2 + 2 * i for i in range(dims)]
    return x.permute(0, 1, *offsets, *positions).reshape(x.shape[0], *node.shape)


def _max_pool(node: Operation, x: Tensor) -> Tensor:
    run: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(node.settings["kernel"]) - 1]
    return run(x, *(node.settings[key] for key in ("kernel", "stride", "padding", "dilation")))


def _avg_pool(node: Operation, x: Tensor) -> Tensor:
    windows = x
    for axis, (k, s) in enumerate(zip(node.settings["kernel"], node.settings["stride"], strict=True)):
        windows = windows.unfold(2 + axis, k, s)
    return windows.flatten(x.dim()).sum(-1) * float.fromhex(node.settings["scale"])


def _normalize(node: Operation, x: Tensor) -> Tensor:
    mean, std = (node.tensors[role].view(-1, *(1,) * (x.dim() - 2)) for role in ("mean", "std"))
    return (x - mean) / std


def _pad_channels(node: Operation, x: Tensor) -> Tensor:
    zeros = x.new_zeros(x.shape[0], node.settings["count"] - x.shape[1], *x.shape[2:])
    return torch.cat([x, zeros], 1)


def _reshape(node: Operation, x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], *node.shape)


def _concat(node: Operation, *parts: Tensor) -> Tensor:
    return torch.cat(parts, 1)


def _sort(node: Operation, x: Tensor) -> Tensor:
    return groupsort(x, node.settings["group_size"], node.settings["axis"] + 1)


_RUN: dict[str, Callable[..., Tensor]] = {
    "linear": lambda node, x: F.linear(x, node.weight, node.bias),
    "conv": _conv,
    "potential": _potential,
    "relu": lambda node, x: x.clamp(min=0),
    "abs": lambda node, x: x.abs(),
    "maxmin": lambda node, x: maxmin(x, node.settings["axis"] + 1),
    "groupsort": _sort,
    "flatten": _reshape,
    "reshape": _reshape,
    "concatenate": _concatenate,
    "first_channels": lambda node, x: x[:, : node.settings["count"]],
    "pad_channels": _pad_channels,
    "identity": lambda node, x: x,
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
    "normalize": _normalize,
    "add": lambda node, x, y: x + y,
    "concat": _concat,
    "scale": lambda node, x: x * float.fromhex(node.settings["factor"]),
}


def operations() -> Sequence[str]:
    """The kinds of node that can be run."""
    return ["input", *_RUN]
