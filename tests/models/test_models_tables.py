"""The architectures layer by layer, against the paper's tables."""

import pytest
import torch
from _models import CONV, FC, FIRST, FLATTEN, MM, NONE, POOL, Row, rows_of, small
from torch import nn
from torch.nn.utils import parametrize

from onelip.models import create_model
from onelip.models.paper import tiny_patch
from onelip.nn import AOLConv2d, AOLLinear, ConcatenationPool2d, LipschitzAvgPool2d


def patchwise_table(w: int, classes: int) -> list[Row]:
    return [
        (POOL, 4, 4, NONE, (8, 8, 48), 1),
        (CONV, 1, 1, MM, (8, 8, 192), 1),
        (CONV, 3, 1, MM, (8, 8, 192), 12),
        (CONV, 1, 1, NONE, (8, 8, 192), 1),
        (FIRST, None, None, NONE, (8, 8, w), 1),
        (FLATTEN, None, None, NONE, (64 * w,), 1),
        (FC, None, None, MM, (64 * w,), 13),
        (FC, None, None, NONE, (64 * w,), 1),
        (FIRST, None, None, NONE, (classes,), 1),
    ]


STANDARD: list[Row] = [
    (CONV, 3, 1, MM, (32, 32, 32), 4),
    (CONV, 2, 2, NONE, (16, 16, 64), 1),
    (CONV, 3, 1, MM, (16, 16, 64), 4),
    (CONV, 2, 2, NONE, (8, 8, 128), 1),
    (CONV, 3, 1, MM, (8, 8, 128), 4),
    (CONV, 2, 2, NONE, (4, 4, 256), 1),
    (CONV, 3, 1, MM, (4, 4, 256), 4),
    (CONV, 2, 2, NONE, (2, 2, 512), 1),
    (CONV, 3, 1, MM, (2, 2, 512), 4),
    (CONV, 2, 2, NONE, (1, 1, 1024), 1),
    (CONV, 1, 1, NONE, (1, 1, 1024), 1),
    (FIRST, None, None, NONE, (1, 1, 10), 1),
    (FLATTEN, None, None, NONE, (10,), 1),
]
FULLY_CONNECTED: list[Row] = [
    (FLATTEN, None, None, NONE, (3072,), 1),
    (FC, None, None, MM, (4096,), 8),
    (FC, None, None, NONE, (4096,), 1),
    (FIRST, None, None, NONE, (10,), 1),
]
ALTERNATIVE: list[Row] = [
    (CONV, 2, 2, MM, (16, 16, 16), 1),
    (CONV, 3, 1, MM, (16, 16, 16), 4),
    (CONV, 2, 2, MM, (8, 8, 64), 1),
    (CONV, 3, 1, MM, (8, 8, 64), 4),
    (CONV, 2, 2, MM, (4, 4, 256), 1),
    (CONV, 3, 1, MM, (4, 4, 256), 4),
    (CONV, 2, 2, MM, (2, 2, 1024), 1),
    (CONV, 1, 1, MM, (2, 2, 1024), 4),
    (CONV, 1, 1, NONE, (2, 2, 1024), 1),
    (FIRST, None, None, NONE, (2, 2, 256), 1),
    (CONV, 2, 2, MM, (1, 1, 1024), 1),
    (CONV, 1, 1, MM, (1, 1, 1024), 4),
    (CONV, 1, 1, NONE, (1, 1, 1024), 1),
    (FIRST, None, None, NONE, (1, 1, 10), 1),
    (FLATTEN, None, None, NONE, (10,), 1),
]
# Name, number of classes, table, number of parameters (biases included) by hand.
TABLES = [
    ("aol-small", 10, patchwise_table(16, 10), 9_408 + 12 * 331_968 + 37_056 + 14 * 1_049_600),
    ("aol-small", 100, patchwise_table(16, 100), 18_724_480),
    ("aol-medium", 10, patchwise_table(32, 10), 62_779_008),
    ("aol-large", 10, patchwise_table(48, 10), 136_193_664),
    ("aol-fc", 10, FULLY_CONNECTED, 146_837_504),
    ("aol-std", 10, STANDARD, 16_411_296),
    ("standard-cnn", 10, STANDARD, 16_411_296),
    ("aol-dil", 10, STANDARD, 16_411_296),
    ("aol-alt", 10, ALTERNATIVE, 15_182_672),
]


@pytest.mark.parametrize(("name", "classes", "table", "parameters"), TABLES)
def test_tables_of_the_paper(name, classes, table, parameters):
    with torch.device("meta"):
        model = create_model(name, num_classes=classes)
        x = torch.empty(2, 3, 32, 32)
    plain = name == "standard-cnn"
    linear = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert all(isinstance(m, (AOLConv2d, AOLLinear)) != plain for m in linear)
    assert sum(p.numel() for p in model.parameters()) == parameters
    for module in linear:
        if not plain:  # without memory there is nothing to rescale; P has W's shape
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
    assert rows_of(model, x) == [(*row[:5], 1) for row in table for _ in range(row[5])]


@pytest.mark.parametrize("name", ["aol-std", "aol-alt", "aol-small"])
def test_padding_is_zero_and_keeps_the_size(name):
    for module in small(name).modules():
        if isinstance(module, nn.Conv2d):
            assert module.padding_mode == "zeros"
            assert module.dilation == (1, 1)
            assert module.padding == (module.kernel_size[0] // 2 if module.stride == (1, 1) else 0,) * 2


def test_dilated_to_a_third_of_the_image():
    def dilations(image_size):
        model = small("aol-dil", image_size=image_size, depth=1)
        found = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
        assert all(m.padding_mode == "circular" and m.padding == m.dilation for m in found)
        return [m.dilation for m in found]

    assert dilations(32) == [(10, 10), (5, 5), (2, 2), (1, 1), (1, 1)]
    assert dilations((32, 64)) == [(10, 21), (5, 10), (2, 5), (1, 2), (1, 1)]


def test_names_of_the_layers_can_be_read():
    with torch.device("meta"):
        names = [name for name, _ in create_model("aol-small").named_children()]
    assert names[:4] == ["patches", "conv1", "conv1_act", "conv2"]
    assert names[-4:] == ["fc13", "fc13_act", "fc14", "logits"]
    assert len(names) == len(set(names)) == 1 + 2 * 13 + 1 + 2 + 2 * 13 + 1 + 1


def test_average_only_where_pixels_are_left():
    assert not any(isinstance(module, LipschitzAvgPool2d) for module in small("aol-std"))
    assert any(isinstance(module, LipschitzAvgPool2d) for module in small("aol-std", image_size=(32, 64)))


@pytest.mark.parametrize(("size", "patch"), [(8, 2), (28, 4), (32, 4), (16, 4), (12, 3), (7, 1), ((8, 28), 2), (4, 1)])
def test_patch_of_the_tiny_network(size, patch):
    assert tiny_patch(size) == patch


def test_strided_layer_is_concatenation_pooling_and_1x1():
    torch.manual_seed(0)
    strided = AOLConv2d(3, 4, 2, stride=2)
    pointwise = AOLConv2d(12, 4, 1)
    x = torch.randn(2, 3, 8, 8)
    P = torch.randn(4, 3, 2, 2)
    for layer, weight in ((strided, P), (pointwise, P.reshape(4, 12, 1, 1))):
        lists = layer.parametrizations
        assert isinstance(lists, nn.ModuleDict)
        with torch.no_grad():
            lists["weight"].original.copy_(weight)
    torch.testing.assert_close(strided(x), pointwise(ConcatenationPool2d(2)(x)))
