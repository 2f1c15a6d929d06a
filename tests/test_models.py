"""The architectures: layer by layer against the paper's tables, norms, layouts, errors."""

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import onelip
from onelip.geometry import UnsupportedLayer
from onelip.methods import _registry as methods
from onelip.models import _registry as registry
from onelip.models import create_model, list_models, register_model
from onelip.models.patchwise import tiny_patch
from onelip.nn import AOLConv2d, AOLLinear, ConcatenationPool2d, FirstChannels, LipschitzAvgPool2d, MaxMin

CONV, FC, POOL, FIRST, FLATTEN = "conv", "fc", "concatenation pooling", "first channels", "flatten"
MM, NONE = True, False
# One row: layer, kernel size, stride, activation, output size (height, width, channels) or (features,), amount.
Row = tuple[str, int | None, int | None, bool, tuple[int, ...], int]


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
# Small enough to run: the same code with fewer channels.
SMALL = {
    "aol-small": {"width": 2, "channels": 8, "convs": 2, "linears": 2},
    "aol-fc": {"width": 64, "depth": 4},
    "aol-std": {"width": 4, "depth": 1},
    "aol-dil": {"width": 4, "depth": 2},
    "aol-alt": {"width": 2, "depth": 1},
    "patchwise-tiny": {},
}


def small(name: str, **kwargs) -> nn.Sequential:
    model = create_model(name, **{**SMALL[name], **kwargs})
    assert isinstance(model, nn.Sequential)
    return model


def images(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def disturb(model: nn.Module, scale: float = 0.3) -> nn.Module:
    """Away from the initialisation, where everything is an isometry."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, dtype=p.dtype, generator=generator), alpha=scale)
    return model


def kind_of(module: nn.Module) -> str:
    kinds = {nn.Conv2d: CONV, nn.Linear: FC, ConcatenationPool2d: POOL, FirstChannels: FIRST, nn.Flatten: FLATTEN}
    return next(kind for base, kind in kinds.items() if isinstance(module, base))


def rows_of(model: nn.Module, x: Tensor) -> list[Row]:
    """What a model does, as rows with amount 1, recorded while it runs."""
    rows: list[Row] = []

    def record(module: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        if isinstance(module, MaxMin):
            kind, kernel, stride, _, size, amount = rows.pop()
            assert kind in (CONV, FC)
            rows.append((kind, kernel, stride, MM, size, amount))
            return
        kernel = getattr(module, "kernel_size", (None,) * 2)
        stride = getattr(module, "stride", (None,) * 2)
        assert kernel[0] == kernel[1]
        assert stride[0] == stride[1]
        rows.append((kind_of(module), kernel[0], stride[0], NONE, (*y.shape[2:], y.shape[1]), 1))

    for child in model.children():
        child.register_forward_hook(record)
    model(x)
    return rows


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


@pytest.mark.parametrize("name", SMALL)
def test_constant_is_one(name):
    assert onelip.summary(small(name)).constant == 1.0


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("in_channels", [1, 3])
def test_initial_network_never_stretches(name, in_channels):
    model = small(name, in_channels=in_channels).double()
    x = images(4, in_channels, 32, 32)
    y = model(x)
    assert y.shape == (4, 10)
    assert (y.norm(dim=1) <= x.flatten(1).norm(dim=1) + 1e-9).all()


@pytest.mark.parametrize(
    ("name", "kwargs", "until"),
    [
        ("aol-small", {"width": 2, "channels": 48}, "narrow"),  # 48 inputs to a patch
        ("patchwise-tiny", {"in_channels": 1}, "narrow"),
        ("aol-fc", {"width": 1024, "in_channels": 1, "depth": 2}, "logits"),
        ("aol-alt", {"width": 12}, "narrow"),  # 12 inputs to the first window
    ],
)
def test_initial_network_is_an_isometry_until_channels_are_dropped(name, kwargs, until):
    model = small(name, **kwargs).double()
    names = [child for child, _ in model.named_children()]
    x = images(2, kwargs.get("in_channels", 3), 32, 32)
    y = model[: names.index(until)](x)
    torch.testing.assert_close(y.flatten(1).norm(dim=1), x.flatten(1).norm(dim=1), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "kwargs", "size"),
    [
        ("patchwise-tiny", {"num_classes": 64, "width": 4, "channels": 8}, (8, 8)),  # all features, nothing dropped
        ("aol-fc", {"num_classes": 64}, (7, 5)),
        ("aol-std", {"num_classes": 64, "width": 2}, (32, 32)),
        ("aol-dil", {"num_classes": 64, "width": 2}, (32, 32)),
        ("aol-alt", {"num_classes": 128}, (32, 32)),
        ("aol-std", {"num_classes": 64, "width": 2}, (64, 32)),  # ends with an average
    ],
)
def test_norm_of_the_jacobian(name, kwargs, size):
    model = disturb(small(name, in_channels=1, image_size=size, **kwargs).double())
    x = images(1, 1, *size)
    J = torch.autograd.functional.jacobian(model, x)
    assert isinstance(J, Tensor)
    norm = float(torch.linalg.matrix_norm(J.reshape(-1, x.numel()), ord=2))
    assert 0 < norm <= 1 + 1e-5


@pytest.mark.parametrize("name", SMALL)
def test_bake_keeps_outputs(name):
    model = disturb(small(name), 0.05)
    x = images(2, 3, 32, 32, dtype=torch.float32)
    baked = onelip.bake(model)
    assert all(not parametrize.is_parametrized(module) for module in baked.modules())
    torch.testing.assert_close(baked(x), model(x))
    plain = small(name, method=None)
    plain.load_state_dict(baked.state_dict())  # the plain twin has the same keys
    torch.testing.assert_close(plain(x), model(x))


@pytest.mark.parametrize("name", SMALL)
def test_memory_formats_agree(name):
    model = disturb(small(name).double(), 0.05)
    x = images(2, 3, 32, 32)
    y = model(x)
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    torch.testing.assert_close(last(x.to(memory_format=torch.channels_last)), y)
    torch.testing.assert_close(model(x.to(memory_format=torch.channels_last)), y)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("method", [None, "none"])
def test_without_a_method(name, method):
    model, constrained = small(name, method=method), small(name)
    assert not any(isinstance(module, (AOLConv2d, AOLLinear)) for module in model.modules())
    assert [n for n, _ in model.named_children()] == [n for n, _ in constrained.named_children()]
    assert [p.shape for p in model.parameters()] == [p.shape for p in onelip.bake(constrained).parameters()]
    x = images(1, 3, 32, 32, dtype=torch.float32)
    assert rows_of(model, x) == rows_of(constrained, x)


@pytest.mark.parametrize("name", SMALL)
def test_training_step(name):
    torch.manual_seed(0)
    model = small(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, labels = images(4, 3, 32, 32, dtype=torch.float32), torch.arange(4)
    before = nn.functional.cross_entropy(model(x), labels)
    before.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    optimizer.step()
    assert nn.functional.cross_entropy(model(x), labels) < before


@pytest.mark.parametrize(
    ("name", "kwargs", "shape"),
    [
        ("aol-small", {"image_size": (8, 12)}, (8, 12)),
        ("aol-small", {"image_size": 14, "patch": 7}, (14, 14)),
        ("aol-small", {"image_size": 9, "patch": 3}, (9, 9)),
        ("aol-fc", {"image_size": (5, 3)}, (5, 3)),
        ("aol-std", {"image_size": (32, 64)}, (32, 64)),
        ("aol-alt", {"image_size": 64}, (64, 64)),
        ("aol-dil", {"image_size": 64}, (64, 64)),
        *(("patchwise-tiny", {"image_size": n}, (n, n)) for n in (1, 7, 8, 9, 16, 28)),
    ],
)
@pytest.mark.parametrize("in_channels", [1, 2, 3])
def test_other_sizes(name, kwargs, shape, in_channels):
    model = small(name, in_channels=in_channels, num_classes=7, **kwargs)
    assert model(torch.randn(2, in_channels, *shape)).shape == (2, 7)
    assert onelip.summary(model).constant == 1.0


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
        lists["weight"].load_state_dict({"original": weight})
    torch.testing.assert_close(strided(x), pointwise(ConcatenationPool2d(2)(x)))


def test_every_name_and_spelling():
    assert list_models() == sorted([*SMALL, "aol-medium", "aol-large", "standard-cnn"])
    assert list_models("aol_[ml]*") == ["aol-large", "aol-medium"]
    assert list_models("nothing*") == []
    assert isinstance(small("aol-fc"), nn.Sequential)
    assert create_model("Patchwise_Tiny", image_size=8)(torch.zeros(1, 3, 8, 8)).shape == (1, 10)


def test_standard_cnn_is_plain_unless_told():
    with torch.device("meta"):
        assert not any(isinstance(m, AOLConv2d) for m in create_model("standard-cnn").modules())
        assert any(isinstance(m, AOLConv2d) for m in create_model("standard-cnn", method="aol").modules())


def test_options_reach_the_method():
    model = small("aol-std", method_options={"side": "auto", "lipschitz": 0.5})
    assert onelip.summary(model[:1]).constant == 0.5
    assert "side='outputs'" in repr(model)


def test_register_model(monkeypatch):
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))

    def my_model(*, num_classes=10, image_size=32, in_channels=3, method="aol", gain=1):
        return nn.Identity(), num_classes, image_size, in_channels, method, gain

    register_model(my_model)  # pyright: ignore[reportArgumentType]
    assert "my-model" in list_models()
    made = create_model("my_model", num_classes=2, image_size=(4, 5), method=None, gain=3)
    assert made[1:] == (2, (4, 5), 3, None, 3)  # pyright: ignore[reportIndexIssue]
    register_model(my_model)  # pyright: ignore[reportArgumentType]

    def aol_small(**kwargs) -> nn.Module:
        return nn.Identity()

    with pytest.raises(ValueError, match=r"not taken, got 'aol-small'.*patchwise"):
        register_model(aol_small)


def test_other_methods_are_applied(monkeypatch):
    def refuses_strides(layer: nn.Module, factor: float = 1.0) -> nn.Module:
        if isinstance(layer, nn.Conv2d) and layer.stride != (1, 1):
            raise UnsupportedLayer("expected stride 1")
        layer.register_buffer("factor", torch.tensor(factor))
        return layer

    aol = methods.get_method("aol")
    other = dataclasses.replace(aol, name="other", layers=(nn.Linear, nn.Conv2d), apply=refuses_strides)
    monkeypatch.setitem(methods.METHODS, "other", other)
    model = small("aol-alt", method="other", method_options={"factor": 2.0})
    linear = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert all(type(module) is nn.Conv2d and module.factor == 2.0 for module in linear)
    assert all(module.stride == (1, 1) for module in linear)  # concatenation pooling instead of strides
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)

    monkeypatch.setitem(methods.METHODS, "dense", dataclasses.replace(other, name="dense", layers=(nn.Linear,)))
    assert small("aol-fc", method="dense")(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    with pytest.raises(UnsupportedLayer, match=r"serves Conv2d, got 'dense', which serves Linear; take another"):
        small("aol-alt", method="dense")


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("aol-smal", {}, r"expected one of the models .*aol-alt.*, got 'aol-smal'; did you mean 'aol-small'\?"),
        ("resnet", {}, "got 'resnet'"),
        ("aol-small", {"image_size": 30}, r"multiple of 4 .*got 30x30; .* 28x28 or 32x32 .* `patch`"),
        ("aol-small", {"image_size": (32, 3)}, r"got 32x3; .* 32x4 "),
        (
            "aol-std",
            {"image_size": 28},
            r"of 32 \(it is halved 5 times\), got 28x28; .* 32x32 .*patchwise-tiny",
        ),
        ("aol-dil", {"image_size": 48}, r"got 48x48; .* 32x32 or 64x64"),
        ("aol-alt", {"image_size": 33}, r"multiple of 32"),
        ("aol-std", {"image_size": 0}, r"expected image_size to be a positive integer or \(height, width\), got 0"),
        ("aol-std", {"image_size": (32,)}, r"got \(32,\)"),
        ("aol-std", {"image_size": True}, "got True"),
        ("aol-fc", {"image_size": 2.5}, "image_size"),
        ("aol-fc", {"num_classes": 65}, "at most the width of the last layer, 64, got 65; take a larger width"),
        ("aol-std", {"num_classes": 129}, "last layer, 128, got 129"),
        ("aol-alt", {"num_classes": 129}, "last layer, 128, got 129"),
        ("aol-small", {"num_classes": 129}, "last layer, 128, got 129"),
        ("aol-fc", {"num_classes": 0}, "expected num_classes to be an integer of at least 1, got 0"),
        ("aol-fc", {"in_channels": 0}, "expected in_channels"),
        ("aol-fc", {"width": 63}, "expected width to be even, .* got 63; take 62 or 64"),
        ("aol-std", {"width": 3}, "expected width to be even"),
        ("aol-alt", {"width": 1}, "expected width to be an integer of at least 2, got 1"),
        ("aol-small", {"width": 10}, "at most channels = 8, got 10"),
        ("aol-small", {"channels": 9}, "expected channels to be even"),
        ("aol-small", {"patch": 0}, "expected patch"),
        ("aol-std", {"depth": -1}, "expected depth"),
        ("aol-fc", {"method": "aool"}, r"got 'aool'; did you mean 'aol'\?"),
        ("aol-fc", {"method": None, "method_options": {"side": "auto"}}, "no method_options where there is no method"),
    ],
)
def test_errors(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        create_model(name, **{**SMALL.get(name, {}), **kwargs})


def test_unknown_keyword():
    with pytest.raises(TypeError, match="widht"):
        create_model("aol-small", widht=3)
