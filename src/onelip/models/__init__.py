"""The paper's architectures, each one `nn.Sequential`, and a small one for a first look.

model = onelip.models.create_model("aol-small", num_classes=100)
onelip.models.list_models("aol-*")
"""

# Importing the files registers what is in them.
from onelip.models import alt, dil, fc, patchwise, std
from onelip.models._registry import create_model, list_models, register_model

__all__ = ["alt", "create_model", "dil", "fc", "list_models", "patchwise", "register_model", "std"]
