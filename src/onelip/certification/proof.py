"""The proof of a network: a bound for every layer, the recursion of rounding errors, and the constants of its logits.

It is about the weights, not about an image, so it is computed once for all images of a shape. Layers are bounded in
float64 with rigorous error terms, or with `exact=True` in rational arithmetic (python-flint), which certificate files
need. Both are proofs.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from onelip.bounds import ProofFailed, Witness, bound_weight, exact_bound
from onelip.bounds.falsify import Claim, Claims, example_points, falsify
from onelip.bounds.fast import Effort
from onelip.certification.radius import Head, make_head
from onelip.core.bake import copy_model, plain_of
from onelip.core.batch_norm import is_foldable
from onelip.core.errors import ProofError
from onelip.core.geometry import padding_of
from onelip.core.state import unchanged
from onelip.graph.kinds import Affine, Exponential, Node, NodeBound, Potential, propagate
from onelip.graph.lowering import Program, lower
from onelip.graph.reference import Reference, check_model_itself

# Called with the number of completed steps, their total number, and the title of the next step.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class LayerBound:
    """The bound ||W||^2 <= square, and the witness from which a checker proves it."""

    square: Fraction
    witness: Witness


@dataclass(frozen=True)
class Proof:
    """The result of `prove`. It is about the program; `onelip.certify` checks that a model has this program.

    Attributes:
        exact: whether the layers are bounded in rational arithmetic, or in float64 with error terms.
        program: the operations of the network.
        node_bounds: Lipschitz constant, norm and rounding error of each node of the program.
        layer_bounds: bounds of the weights of the linear nodes, by their index.
        head: Lipschitz constant and rounding error of the difference of each pair of logits.
    """

    exact: bool
    program: Program
    node_bounds: tuple[NodeBound, ...]
    layer_bounds: dict[int, LayerBound]
    head: Head

    @property
    def constant(self) -> float:
        """A Lipschitz constant of the map from images to logits (L2, real arithmetic)."""
        return self.node_bounds[-1].lipschitz

    @property
    def error(self) -> float:
        """Upper bound on the L2 distance of the computed logits from those in real arithmetic, for every image."""
        return self.node_bounds[-1].error

    def __str__(self) -> str:
        how = "exact" if self.exact else "fast"
        return (
            f"proved ({how}): Lipschitz constant {self.constant!r}, rounding error of the logits at most "
            f"{self.error:.3g}, {len(self.layer_bounds)} linear layers"
        )


def prove(
    model: nn.Module,
    input_shape: Sequence[int],
    *,
    exact: bool = False,
    effort: Effort = "normal",
    progress: Progress | None = None,
) -> Proof:
    """Prove Lipschitz constants for the stored weights of a model, and bound the rounding of its float64 program.

    The proof is about `onelip.bake(model)`: the weights of parametrized layers are computed, and batch normalisation is
    folded.

    Args:
        model: a plain or parametrized network; float32 weights are converted to float64, which is exact.
        input_shape: shape of one image (channels, height, width).
        exact: bound the layers in rational arithmetic, which needs python-flint, instead of float64 with error terms.
            Both are proofs; certificate files need the exact one.
        effort: more effort gives tighter bounds of the layers.
        progress: function that is called for every layer with the number of completed layers, their total number, and
            the name of the layer.

    Returns:
        The proof, which can be passed to `onelip.certify`.

    Raises:
        ProofError: if an operation has no rule, or numbers are too large.
        CannotTrace: if the model has no fixed graph, changes from call to call, or computes something else than its
            trace.
        UnsoundBound: if a measurement contradicts the proof, which is a bug in onelip.

    Examples:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> _ = nn.init.eye_(model[1].weight)
        >>> 1 <= prove(model, (1, 2, 2)).constant < 1 + 1e-8
        True
    """
    with unchanged(model):
        points = example_points(torch.full((1, *_checked_shape(input_shape)), 0.5), 4)
        proved = prove_baked(plain_of(model), input_shape, exact, effort, progress, points)
        check_model(proved, model, points)
    return proved


def prove_baked(
    plain: nn.Module,
    input_shape: Sequence[int],
    exact: bool,
    effort: Effort,
    progress: Progress | None,
    points: Tensor,
) -> Proof:
    """`prove` for a network that is baked already, which is unchanged; tested at the given points."""
    program = program_of(plain, _checked_shape(input_shape))
    proved = _prove(program, exact, effort, progress or _silent)
    falsify(claims_of_proof(proved, points), points[:2])
    return proved


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    is_shape = isinstance(shape, Sequence) and len(shape) > 0 and all(isinstance(n, int) and n > 0 for n in shape)
    if not is_shape:
        raise ValueError(
            f"expected the shape of one image (channels, height, width), got {shape!r}; leave out the batch axis"
        )
    return tuple(shape)


def claims_of_proof(proof: Proof, points: Tensor) -> Claims:
    """Claims to test: the constant of every node, and of the difference of the two largest logits at each point."""
    nodes, bounds = proof.program.nodes, proof.node_bounds
    steps = []
    for node, bound in zip(nodes, bounds, strict=True):
        before = [bounds[i].lipschitz for i in node.inputs]
        factor = bound.lipschitz / before[0] if len(before) == 1 and before[0] > 0 else None
        steps.append(Claim(node.title, node.inputs, node.run, bound.lipschitz, factor))
    targets = []
    for y, j in proof.program.run(points[:2])[-1].topk(2).indices.tolist():
        difference = functools.partial(_difference, y=y, j=j)
        targets.append(Claim(f"logit {y} - logit {j}", (len(nodes) - 1,), difference, proof.head.slope[y][j]))
    return Claims(steps, 64, targets)


def _difference(logits: Tensor, y: int, j: int) -> Tensor:
    return logits[:, y : y + 1] - logits[:, j : j + 1]


def check_model(proof: Proof, model: nn.Module, points: Tensor) -> None:
    """Run the model as different callers would, and compare the results with those of the proved program.

    Raises:
        CannotTrace: if it computes something else.
        ChangingModel: if a run changes the model.
    """
    like = next((p.detach() for p in model.parameters() if p.is_floating_point()), torch.zeros((), dtype=torch.float64))
    # Subtracting a mean before the division rounds differently than folding it into a bias.
    is_folded = any(map(is_foldable, model.modules()))
    dtypes = [like.dtype, torch.float32] if is_folded else [like.dtype]
    check_model_itself(model, Reference(claims_of_proof(proof, points), dtypes), points, like)


def program_of(plain: nn.Module, shape: tuple[int, ...]) -> Program:
    """The float64 program of a baked network, in eval mode on the CPU; the network itself is unchanged."""
    return lower(copy_model(plain).to("cpu").double().eval(), shape)


def check_same(proof: Proof, plain: nn.Module, shape: tuple[int, ...]) -> None:
    """Trace a baked network again and compare it with the proved program: operations, settings and all numbers.

    Raises:
        ProofError: naming the first difference.
        CannotTrace: if the model has no fixed graph now.
    """
    if proof.program.input_shape != shape:
        raise ProofError(
            f"expected images of the proof's shape {proof.program.input_shape}, got {shape}; "
            "prove the model for this shape"
        )
    if (changed := first_different_node(proof.program, program_of(plain, shape))) is not None:
        raise ProofError(
            f"expected the program that was proved, got a model that is another one now: {changed}; prove it again"
        )


def first_different_node(one: Program, other: Program) -> str | None:
    """Describe the first difference of two programs, in operations, settings or numbers; None if they are the same.

    Examples:
        >>> from onelip.graph.kinds import Abs, Input, Relu
        >>> one, other = (Program((Input((), (2,)), kind((0,), (2,), "act"))) for kind in (Relu, Abs))
        >>> first_different_node(one, other)
        "node 1 (relu at 'act'): expected op 'relu', got 'abs'"
    """
    for index, (a, b) in enumerate(zip(one.nodes, other.nodes, strict=False)):
        mine, theirs = a.record(), b.record()
        for key in (*mine, *theirs):
            if repr(mine.get(key)) != repr(theirs.get(key)):
                got = f"expected {key} {mine.get(key)!r:.80}, got {theirs.get(key)!r:.80}"
                return f"node {index} ({a.title}): {got}"
        for role, stored in a.tensors.items():
            # Bit for bit: 0 and -0 differ, and NaN does not occur in a program.
            old, new = (values.contiguous().view(torch.int64) for values in (stored.values, b.tensors[role].values))
            if old.shape != new.shape or not torch.equal(old, new):
                return f"node {index} ({a.title}): expected the {role} as it was, got other numbers in {stored.name!r}"
    if len(one.nodes) != len(other.nodes):
        return f"expected {len(one.nodes)} nodes, got {len(other.nodes)}"
    return None


def _prove(program: Program, exact: bool, effort: Effort, progress: Progress) -> Proof:
    layer_bounds: dict[int, LayerBound] = {}
    seen: dict[object, LayerBound] = {}  # shared layers are proved once
    node_bounds: list[NodeBound] = []
    total = sum(isinstance(node, Affine) for node in program.nodes)
    nodes: list[Node] = []
    for index, node in enumerate(program.nodes):
        if isinstance(node, Affine):
            progress(len(layer_bounds), total, node.place or node.kind)
            key = (node.weight.name or index, node.geometry)
            layer_bounds[index] = seen.get(key) or _bound(node, exact, effort)
            seen[key] = layer_bounds[index]
            node = replace(node, square=layer_bounds[index].square)
        nodes.append(node)
        node_bounds.append(propagate(node, *(node_bounds[i] for i in node.inputs)))
    program = Program(tuple(nodes))
    progress(total, total, "pairs of classes")
    return Proof(exact, program, tuple(node_bounds), layer_bounds, make_head(program, node_bounds))


def _bound(node: Affine, exact: bool, effort: Effort) -> LayerBound:
    weight, geometry = node.weight.values, node.geometry
    # A norm 1 + t makes the constant of a potential 2 (1 + t)^2 - 1; a norm below 1 does not reduce it.
    enough = 0.0
    if isinstance(node, Potential):
        enough = 1 + 2.0**-16
    # The gain of a series grows with a power of the norm.
    if isinstance(node, Potential | Exponential) and effort == "normal":
        effort = "high"
    try:
        fast = bound_weight(weight, geometry, effort=effort, exact=exact, enough=enough)
        if exact and fast.witness.kind != "frequencies":  # always proved in integers
            try:
                found = exact_bound(weight, geometry, fast.witness)
            except ProofFailed:  # the claim is too close to the norm; the default witness always works
                found = exact_bound(weight, geometry)
            return LayerBound(found.square, found.witness)
    except (ValueError, OverflowError) as error:
        raise ProofError(f"{node.title}: {error}") from error
    return LayerBound(Fraction(fast.value) ** 2, fast.witness)


def _silent(done: int, total: int, what: str) -> None:
    pass


# ---- Programs whose arithmetic is not that of Note [Arithmetic] in core/rounding.py are rejected
#
# The note allows any order of summation, but only sums of products. Fast convolutions (Winograd in NNPACK, algorithms
# of oneDNN and cuDNN) compute something else, and TF32, bfloat16 and autocast round differently. All of these are for
# other dtypes than float64: for float64 on the CPU, torch uses im2col and a matrix multiplication. `check_backends`
# asks torch for the backend of each layer, to be sure.


# Each computes patches as columns, then one matrix product per group; "Empty" computes nothing.
_PLAIN_BACKENDS = frozenset(
    ("Slow2d", "Slow3d", "SlowDilated2d", "SlowDilated3d", "SlowTranspose2d", "SlowTranspose3d", "Empty")
)


def check_sound(model: nn.Module) -> None:
    """Reject a model that is not a float64 program on the CPU in eval mode.

    Raises:
        ProofError: if it is not; the message names the fix.
    """
    if not isinstance(model, nn.Module):
        raise ProofError(f"expected a torch module, got {type(model).__name__}; wrap the function in an nn.Module")
    instead = "or ask for mode='real-arithmetic', whose radii do not include rounding"
    for device in {"cpu", *(p.device.type for p in model.parameters())}:
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            raise ProofError(
                f"expected no autocast, got torch.autocast to {torch.get_autocast_dtype(device)}: it rounds more than "
                f"the proof allows; leave the region, {instead}"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_floating_point():
            continue
        if tensor.dtype != torch.float64:
            raise ProofError(
                f"expected a float64 program for the sound mode, got {_short(tensor.dtype)} in {name!r}: its rounding "
                f"is too coarse for a proof; call model.double(), which is exact, {instead}"
            )
        if tensor.device.type != "cpu":
            raise ProofError(
                f"expected a program on the CPU for the sound mode, got {tensor.device} in {name!r}: the "
                f"rounding errors of GPU libraries are not known; call model.cpu(), {instead}"
            )
    training = next((name for name, module in model.named_modules() if module.training), None)
    if training is not None:
        what = f"{training!r}" if training else "the model"
        raise ProofError(f"expected a model in eval mode, got {what} in training mode; call model.eval()")
    if not _rounds_to_nearest():
        raise ProofError(
            "expected float64 that rounds to nearest, got another rounding mode; set the CPU back to round-to-nearest"
        )


def check_backends(program: Program, batch_size: int) -> None:
    """Reject convolutions that torch does not compute as sums of products.

    Raises:
        ProofError: if there is one; the message names the layer.
    """
    select = getattr(torch._C, "_select_conv_backend", None)
    for node in program.nodes:
        if not isinstance(node, Affine) or node.conv is None:
            continue
        if select is None:
            raise ProofError(
                "the backends of convolutions are unknown in this version of torch; install torch 2.10 or newer"
            )
        directions = (False, True) if isinstance(node, Potential) else (False,)
        for adjoint, batch in itertools.product(directions, (1, batch_size)):
            name = _backend(select, node, node.conv, adjoint, batch)
            if name not in _PLAIN_BACKENDS:
                raise ProofError(
                    f"{node.title}: expected a convolution by im2col and matrix products, got torch's backend {name}, "
                    "whose rounding is not bounded; use torch for the CPU without extra backends"
                )


def _backend(select: Any, node: Affine, conv: nn.modules.conv._ConvNd, adjoint: bool, batch: int) -> str:
    """Name of torch's backend for a convolution, or for its adjoint (which keeps the size)."""
    weight, pairs = node.weight.values, padding_of(conv)
    channels = (conv.out_channels, conv.in_channels) if adjoint else (conv.in_channels, conv.out_channels)
    # Other padding is done before the convolution; the backend does not depend on it.
    padding = [left if left == right and not node.is_circular else 0 for left, right in pairs]
    sizes = [n + 2 * (sum(pair) - p) for n, pair, p in zip(node.pixels, pairs, padding, strict=True)]
    # An expanded scalar: only dtype and shape matter.
    x = torch.zeros((), dtype=torch.float64).expand(batch, channels[0], *sizes)
    apart = adjoint or isinstance(node, Exponential)  # the bias is not added by the convolution
    bias = None if apart or node.bias is None else node.bias.values
    stride, dilation, output_padding = map(list, (conv.stride, conv.dilation, conv.output_padding))
    transposed = conv.transposed or adjoint
    arguments = stride, padding, dilation, transposed, output_padding, conv.groups, [channels[1]]
    return select(x, weight, bias, *arguments).name


def _rounds_to_nearest() -> bool:
    one, half = torch.ones((), dtype=torch.float64), torch.full((), 2.0**-53, dtype=torch.float64)
    up, down = one + 3 * half, one + half  # ties go to the even neighbour; directed rounding gets one of these wrong
    return bool(up == 1 + 2.0**-51) and bool(down == 1) and bool(-one - half == -1)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
