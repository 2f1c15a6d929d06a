"""ONNX: one file, any batch size, compared with torch in ONNX Runtime before it is written.

What is checked: on the images tried, |logits of ONNX Runtime - logits of torch| <= 2^13 u max(1, largest |logit|),
where u is the unit roundoff of the type (2^-53 or 2^-24). That is room for the rounding of deep networks summed in
another order, and none for a wrong operation, nor in float64 for one that secretly runs in float32. It is a test, no
proof.

What a certificate proves is about the float64 program: its inner products summed conventionally in any order. A float64
export is such a program (see lowering.py). A float32 export computes other numbers, and no certificate speaks about it.
"""

import hashlib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from onelip._version import __version__
from onelip.export._bake import bake
from onelip.export.errors import ExportError
from onelip.export.lowering import rules
from onelip.export.places import check_free, place

if TYPE_CHECKING:
    import onnx

OPSET = 20
INPUT, OUTPUT = "image", "logits"
ROUNDINGS = 2.0**13
LIMIT = 2**31 - 2**20  # bytes: a protobuf message ends at 2 GiB

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}


@dataclass(frozen=True)
class OnnxReport:
    """What was written, and how far ONNX Runtime was from torch."""

    path: Path
    sha256: str
    dtype: str
    input: str  # "float32", "float64" or "uint8"
    difference: float  # largest |logit - logit| seen
    bound: float  # what was allowed
    images: int  # how many were compared

    def to_json(self) -> dict[str, Any]:
        """As `onelip export --json` has it."""
        return {**self.__dict__, "path": str(self.path)}


class _Deployed(nn.Module):
    """The network with the input as it is shipped: the scaling is part of the function."""

    def __init__(self, plain: nn.Module, dtype: torch.dtype, uint8_input: bool) -> None:
        super().__init__()
        self.plain, self.dtype, self.uint8_input = plain, dtype, uint8_input

    def forward(self, image: Tensor) -> Tensor:
        return self.plain(image.to(self.dtype) / 255 if self.uint8_input else image)


def export_onnx(
    model: nn.Module,
    path: str | Path,
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    uint8_input: bool = False,
    class_names: Sequence[str] = (),
    facts: Mapping[str, str] | None = None,
    images: Tensor | None = None,
    force: bool = False,
) -> OnnxReport:
    """Write the baked model as ONNX: input "image" (batch, *shape), output "logits" (batch, classes).

    Args:
        model: any traceable model; a baked copy in eval mode is exported, the model is left as it is.
        path: the file to write, whole or not at all.
        shape: of one image, (channels, height, width).
        dtype: float64 for the program that certificates speak about, float32 for speed.
        uint8_input: take uint8 images and divide by 255 inside; otherwise images of `dtype` in [0, 1].
        class_names: kept in the file's metadata.
        facts: more metadata, such as the hash of the weights.
        images: uint8 (n, *shape) to compare on; random ones if None. Black and white images are tried besides.
        force: overwrite a file that is there.

    Raises:
        ExportError: if the model cannot be traced, if ONNX Runtime lacks an operation, or if it disagrees with torch.

    Example:
        >>> import tempfile
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = export_onnx(net, f"{folder}/net.onnx", (1, 2, 2), dtype=torch.float64)
        >>> report.difference <= report.bound < 1e-11
        True
    """
    content, report = make_onnx(
        model, path, shape, dtype=dtype, uint8_input=uint8_input, class_names=class_names, facts=facts, images=images,
        force=force,
    )  # fmt: skip
    place([(Path(path), content)], force=force)
    return report


def make_onnx(
    model: nn.Module,
    path: str | Path,
    shape: Sequence[int],
    *,
    dtype: torch.dtype,
    uint8_input: bool,
    class_names: Sequence[str],
    facts: Mapping[str, str] | None,
    images: Tensor | None,
    force: bool,
) -> tuple[bytes, OnnxReport]:
    """The content of the file, checked, and the report; for those who write several files at once."""
    if dtype not in UNIT_ROUNDOFF:
        raise ExportError(f"expected dtype float32 or float64, got {dtype}; others have no certified meaning")
    _need_packages()
    check_free([Path(path)], force=force)
    plain = bake(model).cpu().to(dtype).eval()
    # The layout of training is of no use to ONNX, which has one; contiguous tensors are traced without copies.
    for tensor in (*plain.parameters(), *plain.buffers()):
        tensor.data = tensor.data.contiguous()
    _check_size(plain)
    network = _Deployed(plain, dtype, uint8_input).eval()
    proto = _trace(network, tuple(shape))
    _describe(proto, network, class_names, facts or {})
    content = proto.SerializeToString(deterministic=True)
    _check_form(proto)
    difference, bound, count = _compare(content, network, _trials(network, tuple(shape), images))
    kind = str(dtype).removeprefix("torch.")
    sha256 = hashlib.sha256(content).hexdigest()
    return content, OnnxReport(Path(path), sha256, kind, "uint8" if uint8_input else kind, difference, bound, count)


def _need_packages() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ExportError(
            f"expected the packages for ONNX, got none ({error.name} is missing): pip install 'onelip[onnx]'"
        ) from error


def _check_size(plain: nn.Module) -> None:
    size = sum(t.numel() * t.element_size() for t in (*plain.parameters(), *plain.buffers()))
    if size > LIMIT:
        raise ExportError(
            f"expected weights below 2 GB for one ONNX file, got {size / 2**30:.1f} GB; export safetensors instead"
        )


def _trace(network: _Deployed, shape: tuple[int, ...]) -> "onnx.ModelProto":
    """The network as a graph of ONNX operations."""
    # Two images: torch.export takes an axis of length 1 for a constant.
    example = torch.zeros(2, *shape, dtype=torch.uint8 if network.uint8_input else network.dtype)
    batch = torch.export.Dim("batch")
    try:
        with _quiet(), torch.no_grad():
            program = torch.export.export(network, (example,), dynamic_shapes=({0: batch},))
            if network.dtype == torch.float64:
                program = program.run_decompositions(dict(rules()))
            found = torch.onnx.export(
                program, dynamo=True, opset_version=OPSET, input_names=[INPUT], output_names=[OUTPUT], verbose=False
            )
    except Exception as error:  # torch's tracer fails in many ways; all of them mean the same to the caller
        raise ExportError(
            f"expected a network that torch.export can trace for any batch size, got {type(error).__name__}: "
            f"{_last_line(error)}; ONELIP_TRACEBACK=1 shows where"
        ) from error
    assert found is not None
    return found.model_proto


@contextmanager
def _quiet() -> Iterator[None]:
    """Neither torch's deprecations of its own code nor its notes on torchvision: nobody here can act on them."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for kind in (DeprecationWarning, FutureWarning, UserWarning):
                warnings.simplefilter("ignore", kind)
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("<class")]  # torch.onnx's summary of the cause
    return (told or lines[:1] or [""])[-1][:300]


def _describe(
    proto: "onnx.ModelProto", network: _Deployed, class_names: Sequence[str], facts: Mapping[str, str]
) -> None:
    """Metadata for the reader; the stack traces that torch puts in, with the paths of this machine, are taken out."""
    for graph in (proto.graph, *proto.functions):
        for part in (*graph.node, *graph.value_info):
            del part.metadata_props[:]
            part.doc_string = ""
        del graph.metadata_props[:]
    for part in (*proto.graph.input, *proto.graph.output, *proto.graph.initializer):
        del part.metadata_props[:]
    proto.producer_name, proto.producer_version = "onelip", __version__
    proto.graph.name = "onelip"
    kind = str(network.dtype).removeprefix("torch.")
    words = {
        "onelip": __version__,
        "arithmetic": f"{kind}, as ONNX Runtime computes it",
        "preprocessing": "input: uint8 pixels; the division by 255 is inside"
        if network.uint8_input
        else f"input: {kind} pixels in [0, 1], that is uint8 / 255",
        "class_names": json.dumps(list(class_names), ensure_ascii=False),
        **facts,
    }
    del proto.metadata_props[:]
    for key, value in words.items():
        proto.metadata_props.add(key=key, value=value)


def _check_form(proto: "onnx.ModelProto") -> None:
    import onnx

    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"expected a valid ONNX graph, got: {_last_line(error)}; please report it") from error


def _trials(network: _Deployed, shape: tuple[int, ...], images: Tensor | None) -> list[Tensor]:
    """Batches of several sizes, one among them."""
    if images is None:
        random = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (32, *shape), dtype=torch.uint8, generator=random)
    if images.dtype != torch.uint8 or images.shape[1:] != shape or not len(images):
        raise ExportError(
            f"expected uint8 images of shape (n, {', '.join(map(str, shape))}) to compare on, got "
            f"{str(images.dtype).removeprefix('torch.')} of {tuple(images.shape)}"
        )
    ends = torch.stack([torch.zeros(shape, dtype=torch.uint8), torch.full(shape, 255, dtype=torch.uint8)])
    every = torch.cat([ends, images])
    if not network.uint8_input:
        every = every.to(network.dtype) / 255
    return [every[:1], every[1:4], *every[4:].split(64)]


@torch.no_grad()
def _compare(content: bytes, network: _Deployed, trials: Sequence[Tensor]) -> tuple[float, float, int]:
    """Largest difference of a logit, what is allowed, and the number of images."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        computed = [torch.from_numpy(session.run([OUTPUT], {INPUT: batch.numpy()})[0]) for batch in trials]
    except Exception as error:  # its exceptions have no common base of their own
        kind = str(network.dtype).removeprefix("torch.")
        advice = "; export float32 instead" if network.dtype == torch.float64 else ""
        raise ExportError(
            f"expected operations that ONNX Runtime has in {kind}, got: {_last_line(error)}{advice}"
        ) from error
    got, expected = torch.cat(computed), torch.cat([network(batch) for batch in trials])
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise ExportError(
            f"expected logits {tuple(expected.shape)} of {expected.dtype}, got {tuple(got.shape)} of {got.dtype} from "
            "ONNX Runtime; please report it"
        )
    difference = float((got.double() - expected.double()).abs().max())
    bound = ROUNDINGS * UNIT_ROUNDOFF[network.dtype] * max(1.0, float(expected.double().abs().max()))
    if not difference <= bound < float("inf"):  # NaN is refused too
        raise ExportError(
            f"expected ONNX Runtime and torch to differ by at most {bound:.1e}, got {difference:.1e}; nothing was "
            "written. Please report the architecture"
        )
    return difference, bound, len(expected)
