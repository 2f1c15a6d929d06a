"""`onelip.export_onnx`: write one ONNX file for any batch size, after comparing ONNX Runtime with torch."""

import hashlib
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from onelip._version import __version__
from onelip.core.bake import bake
from onelip.core.images import to_float
from onelip.export.decompositions import float64_decompositions
from onelip.export.files import ExportError, check_free, write_files

if TYPE_CHECKING:
    import onnx

OPSET = 20
INPUT, OUTPUT, BATCH = "image", "logits", "batch"
ROUNDINGS = 2.0**13
LIMIT = 2**31 - 2**20  # bytes: a protobuf message is limited to 2 GiB

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}


@dataclass(frozen=True)
class OnnxReport:
    """Result of an ONNX export, with the difference between ONNX Runtime and torch.

    Attributes:
        path: the file.
        sha256: hash of the file.
        dtype: "float32" or "float64".
        input: "float32", "float64" or "uint8".
        difference: largest difference of a logit.
        bound: largest allowed difference.
        images: number of compared images.
    """

    path: Path
    sha256: str
    dtype: str
    input: str
    difference: float
    bound: float
    images: int

    def to_json(self) -> dict[str, Any]:
        """Return the report as `onelip export --json` prints it."""
        return {**self.__dict__, "path": str(self.path)}


class _Deployed(nn.Module):
    """The network with the scaling of its input."""

    def __init__(self, plain: nn.Module, dtype: torch.dtype, uint8_input: bool) -> None:
        super().__init__()
        self.plain, self.dtype, self.uint8_input = plain, dtype, uint8_input

    def forward(self, image: Tensor) -> Tensor:
        return self.plain(to_float(image, self.dtype) if self.uint8_input else image)


def export_onnx(
    model: nn.Module,
    path: str | Path,
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    uint8_input: bool = False,
    class_names: Sequence[str] = (),
    metadata: Mapping[str, str] | None = None,
    images: Tensor | None = None,
    extra_files: Sequence[tuple[Path, bytes]] = (),
    force: bool = False,
) -> OnnxReport:
    r"""Bake a model and write it as an ONNX file.

    Before the file is written, ONNX Runtime runs it on some images, and its logits must agree with those of torch:

    $$|f_{ONNX} - f_{torch}| \le 2^{13}\, u \max(1, \max |f_{torch}|),$$

    where $u$ is the unit roundoff of the dtype ($2^{-53}$ or $2^{-24}$). This allows for the rounding of deep networks
    with sums in another order, but not for a wrong operation, and not for a float64 operation that runs in float32. It
    is a test, not a proof.

    Certificates hold for the float64 program, with inner products summed conventionally in any order. A float64 export
    is such a program (see `onelip.export.decompositions`). No certificate holds for a float32 export.

    Args:
        model: any model that torch.export can trace; a baked copy in eval mode is exported.
        path: the file to write.
        shape: shape of one image, (channels, height, width).
        dtype: torch.float64 for the certified program, torch.float32 for speed.
        uint8_input: whether the exported network takes uint8 images and divides them by 255. Default: it takes images
            of `dtype` in [0, 1].
        class_names: names of the classes, stored in the metadata of the file.
        metadata: additional metadata, such as the hash of the weights.
        images: uint8 images (N, *shape) for the comparison, besides a black and a white one. Default: random images.
        extra_files: other files (path, content) to write; either all files are written or none.
        force: overwrite existing files.

    Shape:
        - Input "image": (batch, *shape), for any batch.
        - Output "logits": (batch, classes).

    Returns:
        The path, the hash and the largest difference from torch.

    Raises:
        ExportError: if the model cannot be traced, if ONNX Runtime lacks an operation, or if it disagrees with torch.
            Nothing is written then.

    Examples:
        >>> import tempfile
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = export_onnx(net, f"{folder}/net.onnx", (1, 2, 2), dtype=torch.float64)
        >>> report.difference <= report.bound < 1e-11
        True
    """
    path = Path(path)
    if dtype not in UNIT_ROUNDOFF:
        raise ExportError(f"expected dtype float32 or float64, got {dtype}")
    _check_packages()
    check_free([path, *(other for other, _ in extra_files)], force=force)
    plain = bake(model).cpu().to(dtype).eval()
    # ONNX has one memory layout; contiguous tensors are traced without copies.
    for tensor in (*plain.parameters(), *plain.buffers()):
        tensor.data = tensor.data.contiguous()
    _check_size(plain)
    network = _Deployed(plain, dtype, uint8_input).eval()
    proto = _trace(network, tuple(shape))
    _name_batch_axis(proto)
    _describe(proto, network, class_names, metadata or {})
    content = proto.SerializeToString(deterministic=True)
    _check_form(proto)
    difference, bound, count = _compare(content, network, _trials(network, tuple(shape), images))
    write_files([*extra_files, (path, content)], force=force)
    kind = str(dtype).removeprefix("torch.")
    sha256 = hashlib.sha256(content).hexdigest()
    return OnnxReport(path, sha256, kind, "uint8" if uint8_input else kind, difference, bound, count)


def _check_packages() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ExportError(f"the package {error.name} is missing: pip install 'onelip[onnx]'") from error


def _check_size(plain: nn.Module) -> None:
    size = sum(t.numel() * t.element_size() for t in (*plain.parameters(), *plain.buffers()))
    if size > LIMIT:
        raise ExportError(
            f"an ONNX file is limited to 2 GB of weights, got {size / 2**30:.1f} GB; export safetensors instead"
        )


def _trace(network: _Deployed, shape: tuple[int, ...]) -> "onnx.ModelProto":
    """Trace the network to a graph of ONNX operations."""
    # Two images: torch.export treats an axis of length 1 as a constant.
    example = torch.zeros(2, *shape, dtype=torch.uint8 if network.uint8_input else network.dtype)
    batch = torch.export.Dim(BATCH)
    try:
        with _quiet(), torch.no_grad():
            program = torch.export.export(network, (example,), dynamic_shapes=({0: batch},))
            if network.dtype == torch.float64:
                program = program.run_decompositions(float64_decompositions())
            found = torch.onnx.export(
                program, dynamo=True, opset_version=OPSET, input_names=[INPUT], output_names=[OUTPUT], verbose=False
            )
    except Exception as error:  # the tracer raises many kinds of errors
        raise ExportError(
            f"torch.export cannot trace the network for any batch size ({type(error).__name__}: {_last_line(error)}); "
            "ONELIP_TRACEBACK=1 shows where"
        ) from error
    assert found is not None
    return found.model_proto


def _name_batch_axis(proto: "onnx.ModelProto") -> None:
    """Name the batch axis; torch.onnx uses a symbol such as s40, also in expressions such as 4*s40."""
    symbol = proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param:
                axis.dim_param = re.sub(rf"\b{re.escape(symbol)}\b", BATCH, axis.dim_param)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's own deprecation warnings and its messages on torchvision: users cannot act on them."""
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
    causes = [line for line in lines if line.startswith("<class")]  # torch.onnx's summary of the cause
    return (causes or lines[:1] or [""])[-1][:300]


def _describe(
    proto: "onnx.ModelProto", network: _Deployed, class_names: Sequence[str], metadata: Mapping[str, str]
) -> None:
    """Write metadata, and remove the stack traces of torch, which contain paths of this machine."""
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
    entries = {
        "onelip": __version__,
        "arithmetic": f"{kind}, as ONNX Runtime computes it",
        "preprocessing": "input: uint8 pixels; the division by 255 is inside"
        if network.uint8_input
        else f"input: {kind} pixels in [0, 1], that is uint8 / 255",
        "class_names": json.dumps(list(class_names), ensure_ascii=False),
        **metadata,
    }
    del proto.metadata_props[:]
    for key, value in entries.items():
        proto.metadata_props.add(key=key, value=value)


def _check_form(proto: "onnx.ModelProto") -> None:
    import onnx

    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"the ONNX graph is invalid: {_last_line(error)}; please report it") from error


def _trials(network: _Deployed, shape: tuple[int, ...], images: Tensor | None) -> list[Tensor]:
    """Batches of several sizes, one of them a single image."""
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
        every = to_float(every, network.dtype)
    return [part for part in (every[:1], every[1:4], *every[4:].split(64)) if len(part)]


@torch.no_grad()
def _compare(content: bytes, network: _Deployed, trials: Sequence[Tensor]) -> tuple[float, float, int]:
    """Largest difference of a logit, the largest that is allowed, and the number of images."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        computed = [torch.from_numpy(session.run([OUTPUT], {INPUT: batch.numpy()})[0]) for batch in trials]
    except Exception as error:  # the exceptions of ONNX Runtime have no common base
        kind = str(network.dtype).removeprefix("torch.")
        advice = "; export float32 instead" if network.dtype == torch.float64 else ""
        raise ExportError(f"ONNX Runtime cannot run the network in {kind}: {_last_line(error)}{advice}") from error
    got, expected = torch.cat(computed), torch.cat([network(batch) for batch in trials])
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise ExportError(
            f"expected logits {tuple(expected.shape)} of {expected.dtype}, got {tuple(got.shape)} of {got.dtype} from "
            "ONNX Runtime; please report it"
        )
    difference = float((got.double() - expected.double()).abs().max())
    bound = ROUNDINGS * UNIT_ROUNDOFF[network.dtype] * max(1.0, float(expected.double().abs().max()))
    if not difference <= bound < float("inf"):  # also true for NaN
        raise ExportError(
            f"expected ONNX Runtime and torch to differ by at most {bound:.1e}, got {difference:.1e}; nothing was "
            "written. Please report it"
        )
    return difference, bound, len(expected)
