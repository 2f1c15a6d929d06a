"""From a model or a run to what is shipped: a plain network, a file of weights, ONNX, a directory for a hub.

    model ──bake──▶ plain network ──save_plain──▶ .safetensors
                                  ──export_onnx──▶ .onnx, run in ONNX Runtime and compared before it is written
    run   ──save_pretrained──▶ directory ──from_pretrained──▶ plain network, the same logits bit for bit

Nothing is pickled. Names besides `bake` are loaded when they are first used: training needs `bake` alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

from onelip.export._bake import NonFiniteWeight, bake

if TYPE_CHECKING:
    from onelip.export.certificates import read_certificate
    from onelip.export.errors import ExportError
    from onelip.export.hub import Pretrained, from_pretrained, load_pretrained, save_pretrained
    from onelip.export.onnx import OnnxReport, export_onnx
    from onelip.export.plain import load_plain, save_plain

_WHERE = {
    "ExportError": "errors",
    "OnnxReport": "onnx",
    "Pretrained": "hub",
    "export_onnx": "onnx",
    "from_pretrained": "hub",
    "load_plain": "plain",
    "load_pretrained": "hub",
    "read_certificate": "certificates",
    "save_plain": "plain",
    "save_pretrained": "hub",
}

__all__ = [
    "ExportError",
    "NonFiniteWeight",
    "OnnxReport",
    "Pretrained",
    "bake",
    "export_onnx",
    "from_pretrained",
    "load_plain",
    "load_pretrained",
    "read_certificate",
    "save_plain",
    "save_pretrained",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'onelip.export' has no attribute {name!r}")
    return getattr(importlib.import_module(f"onelip.export.{_WHERE[name]}"), name)
