"""Architectures of the paper by name, and a small one that trains in a minute on a CPU.

    model = onelip.create_model("aol-small", num_classes=100)
    onelip.list_models("aol-*")

All are `nn.Sequential`. `register_model` adds your own.
"""

from onelip.models import fast as fast, paper as paper, teacher as teacher
from onelip.models.registry import (
    ModelDescription as ModelDescription,
    create_model as create_model,
    describe_model as describe_model,
    list_models as list_models,
    model_options as model_options,
    register_model as register_model,
)
