"""Export plain weights, ONNX files, and directories for the Hugging Face hub.

    model ──bake──▶ plain network ──save_plain──▶ .safetensors
                                  ──export_onnx──▶ .onnx, compared with torch in ONNX Runtime before it is written
    run   ──write_tryit──▶ folder with a page that runs the network in the browser
    run   ──save_pretrained──▶ directory ──from_pretrained──▶ plain network, the same logits bit for bit

Nothing is pickled. Names are imported on first use.
"""

from typing import TYPE_CHECKING

from onelip.core.imports import lazy_names

if TYPE_CHECKING:
    from onelip.core.bake import bake as bake
    from onelip.export.files import (
        ExportError as ExportError,
        load_plain as load_plain,
        read_certificate as read_certificate,
        save_plain as save_plain,
    )
    from onelip.export.hub import (
        Pretrained as Pretrained,
        ZooEntry as ZooEntry,
        from_pretrained as from_pretrained,
        list_zoo as list_zoo,
        load_pretrained as load_pretrained,
        save_pretrained as save_pretrained,
    )
    from onelip.export.onnx import OnnxReport as OnnxReport, export_onnx as export_onnx
    from onelip.export.tryit import TryIt as TryIt, write_tryit as write_tryit

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
