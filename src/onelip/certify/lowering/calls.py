"""Rules for calls of torch, by the name of the ATen operation. `call` holds all of its arguments by name."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onelip.bounds.graph import Node, Ref
from onelip.certify.lowering._context import Context, no_rule
from onelip.certify.lowering.arithmetic import ARITHMETIC
from onelip.certify.program import Operation


def _same(low: Context, node: Node, call: Mapping[str, Any]) -> int:
    return low.where[next(iter(call.values())).index]


def _dropout(low: Context, node: Node, call: Mapping[str, Any]) -> Operation | int:
    return no_rule(node) if call["train"] else low.where[call["input"].index]


def _exact(op: str) -> Callable[..., Operation]:
    def rule(low: Context, node: Node, call: Mapping[str, Any]) -> Operation:
        return low.operation(op, node, next(iter(call.values())))

    return rule


def _reshape(low: Context, node: Node, call: Mapping[str, Any]) -> Operation | int:
    # Row-major, and axis 0 keeps its length (checked), so each sample is reshaped by itself.
    operand = next(iter(call.values()))
    if low.shape(operand) == node.shape[1:]:
        return low.where[operand.index]
    return low.operation("flatten" if len(node.shape) == 2 else "reshape", node, operand)


def _permute(low: Context, node: Node, call: Mapping[str, Any]) -> Operation | int:
    still = [axis % len(node.shape) for axis in call["dims"]] == list(range(len(node.shape)))
    return low.where[call["self"].index] if still else no_rule(node)


def _slice(low: Context, node: Node, call: Mapping[str, Any]) -> Operation | int:
    first, end = call["start"] or 0, call["end"]
    everything = first == 0 and (end is None or end >= 2**62) and call["step"] == 1
    if call["dim"] % len(node.shape) == 0 and not everything:
        return no_rule(node)  # some of the images: another function for each size of the batch
    if low.shape(call["self"]) == node.shape[1:]:
        return low.where[call["self"].index]
    if call["dim"] % len(node.shape) != 1 or (call["start"] or 0) != 0 or call["step"] != 1:
        return no_rule(node)
    return low.operation("first_channels", node, call["self"], count=node.shape[1])


def _cat(low: Context, node: Node, call: Mapping[str, Any]) -> Operation:
    parts = call["tensors"]
    if call["dim"] % len(node.shape) != 1 or not all(isinstance(part, Ref) for part in parts):
        return no_rule(node)
    return low.operation("concat", node, *parts)


def _pixel_unshuffle(low: Context, node: Node, call: Mapping[str, Any]) -> Operation:
    return low.operation("concatenate", node, call["self"], kernel=[call["downscale_factor"]] * 2)


def _sizes(value: int | Sequence[int], axes: int) -> list[int]:
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * axes if len(numbers) == 1 else numbers


def _max_pool(low: Context, node: Node, call: Mapping[str, Any]) -> Operation:
    sizes = low.shape(call["self"])[1:]
    kernel = _sizes(call["kernel_size"], len(sizes))
    stride = _sizes(call["stride"] or kernel, len(sizes))
    padding, dilation = _sizes(call["padding"], len(sizes)), _sizes(call["dilation"], len(sizes))
    each = list(zip(sizes, kernel, stride, padding, dilation, node.shape[2:], strict=True))
    floor_mode = all((n + 2 * p - d * (k - 1) - 1) // s + 1 == out for n, k, s, p, d, out in each)
    # Every window must hold a pixel: one of padding alone is -infinity.
    filled = all(any(0 <= s * o + d * t - p < n for t in range(k)) for n, k, s, p, d, out in each for o in range(out))
    if not (floor_mode and filled):
        return no_rule(node)
    windows = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation, "sizes": list(sizes)}
    return low.operation("max_pool", node, call["self"], **windows)


def _avg_pool(low: Context, node: Node, call: Mapping[str, Any]) -> Operation:
    sizes = low.shape(call["self"])[1:]
    kernel = _sizes(call["kernel_size"], len(sizes))
    stride = _sizes(call["stride"] or kernel, len(sizes))
    whole = [(n - k) // s + 1 for n, k, s in zip(sizes, kernel, stride, strict=True)]
    if any(_sizes(call["padding"], len(sizes))) or call.get("divisor_override") or tuple(whole) != node.shape[2:]:
        return no_rule(node)
    return average(low, node, call["self"], kernel, stride, 1.0)


def _adaptive(low: Context, node: Node, call: Mapping[str, Any]) -> Operation:
    sizes = low.shape(call["self"])[1:]
    if any(n != 1 for n in node.shape[2:]):
        return no_rule(node)
    return average(low, node, call["self"], sizes, sizes, 1.0)


def _mean(low: Context, node: Node, call: Mapping[str, Any]) -> Operation:
    operand = call["self"]
    axes = 1 + len(low.shape(operand))
    spatial = sorted(axis % axes for axis in call["dim"] or ())
    if spatial != list(range(2, axes)) or not call["keepdim"]:
        return no_rule(node)
    return _adaptive(low, node, call)


def average(
    low: Context, node: Node, operand: Ref, kernel: Sequence[int], stride: Sequence[int], factor: float
) -> Operation:
    # The number nearest to factor / size; the error of that is one of the roundings of the rule.
    scale = factor / math.prod(kernel)
    windows = {"kernel": list(kernel), "stride": list(stride), "sizes": list(low.shape(operand)[1:])}
    return low.operation("avg_pool", node, operand, **windows, scale=scale.hex())


CALLS: dict[str, Callable[[Context, Node, Mapping[str, Any]], Operation | int]] = {
    **dict.fromkeys(("aten.clone.default", "aten.alias.default", "aten.contiguous.default"), _same),
    "aten.detach.default": _same,
    "aten.dropout.default": _dropout,
    "aten.relu.default": _exact("relu"),
    "aten.abs.default": _exact("abs"),
    **dict.fromkeys(("aten.view.default", "aten.reshape.default", "aten.flatten.using_ints"), _reshape),
    **dict.fromkeys(("aten._unsafe_view.default", "aten.unsqueeze.default", "aten.unflatten.int"), _reshape),
    **dict.fromkeys(("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims"), _reshape),
    "aten.permute.default": _permute,
    "aten.slice.Tensor": _slice,
    "aten.cat.default": _cat,
    **ARITHMETIC,
    "aten.pixel_unshuffle.default": _pixel_unshuffle,
    **{f"aten.max_pool{dims}d.default": _max_pool for dims in (1, 2, 3)},
    **{f"aten.avg_pool{dims}d.default": _avg_pool for dims in (1, 2, 3)},
    **{f"aten.adaptive_avg_pool{dims}d.default": _adaptive for dims in (1, 2, 3)},
    "aten.mean.dim": _mean,
}
