"""Recipes: one frozen record that is the options of `onelip train` and the config of a run; and presets.

The defaults are those of the paper (section Experiments; appendix, Data augmentation). No torch here: the command line
reads this file to print its help.
"""

import dataclasses
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args, get_origin

from onelip.core.errors import RecipeError, check_known, did_you_mean
from onelip.data.registry import known_name

VERSION = 1  # increased when a field changes its meaning

# Fields that may change when a run is resumed on another machine; the weights then agree up to rounding.
MACHINE_FIELDS = ("device", "threads", "compile", "channels_last", "products")

# Fields that older recipes of this version lack; those runs did what the default does.
LATER_FIELDS = (
    "gradient_clip",
    "loss",
    "loss_options",
    "optimizer",
    "optimizer_options",
    "epoch_part",
    "evaluate_every",
    "image_size",
    "start_from",
    "accumulate",
    "ema",
    "retract_every",
    "teacher",
    "teacher_temperature",
    "products",
)


@dataclass(frozen=True)
class Recipe:
    """All options that determine the result of a run."""

    data: str = "cifar10"
    """Name of a data set (see onelip data), or a path: .npz, folder with one subfolder per class, official files."""
    image_size: str = "original"
    """Resize all images on loading to N (a square) or HEIGHTxWIDTH pixels, such as 64 or 48x64, without keeping their
    aspect ratio; "original" keeps their size. The run remembers it."""
    model: str = "aol-small"
    """Name of an architecture; see onelip models."""
    method: str = "default"
    """Name of a method (see onelip methods), "none" for plain layers, "default" for the model's own."""
    model_options: tuple[str, ...] = ()
    """Options of the model, as key=value: width=8 convs=3."""
    method_options: tuple[str, ...] = ()
    """Options of the method, as key=value: side=auto steps=2."""
    start_from: str = ""
    """Run directory whose weights this new run starts from, with the options of that run; its own files are unchanged.
    The learning rate starts again with the first step of its schedule."""
    teacher: str = ""
    """Run directory of a teacher: its probabilities for the augmented training images replace the labels
    (distillation). It has the same classes and image size, and any model and method; see --preset teacher."""
    teacher_temperature: float = 3.0
    """The logits of the teacher are divided by the temperature of its own training times this number. With 1, its
    probabilities for the images that it was trained on are almost 0 or 1."""
    epochs: int = 1000
    """Number of passes over the training images."""
    epoch_part: float = 1.0
    """Part of the training images in each epoch, a new random one each time."""
    evaluate_every: int = 1
    """Number of epochs between evaluations and log lines; the last epoch is always evaluated."""
    batch_size: int = 250
    """Images per step, over all processes."""
    accumulate: int = 1
    """Number of parts of a batch whose gradients are computed one after the other: less memory, and the same gradient
    up to rounding, except that batch centring and batch normalisation take the mean of each part, and power iterations
    advance with each part."""
    seed: int = 0
    """Seed of the initial weights, the order of the images and the augmentation."""
    validation: float = 0.0
    """Fraction of the training images held out for validation; choose settings by it, and report the test images."""

    loss: str = "default"
    """Name of a loss (offset-cross-entropy, lmt, gloro, emma and others, see docs/methods.md) or module:callable;
    "default" for the loss of the method, which is offset-cross-entropy for most."""
    loss_options: tuple[str, ...] = ()
    """Options of the loss, as key=value: epsilon=0.25 ramp=0.3."""
    offset: float = math.sqrt(2)
    """Offset u of the cross-entropy: the margin that training asks for."""
    temperature: float = 0.25
    """Temperature t of the cross-entropy."""
    optimizer: Literal["sgd", "adamw", "muon"] = "sgd"
    """sgd as in the paper, adamw, or muon: steps and weights are kept orthogonal (onelip.optim.LipschitzMuon), which
    trains AOL layers many times faster; its learning rate is about the angle of a step: 0.02 to 0.08, or 0.005 for deep
    networks with 3x3 kernels such as aol-small."""
    optimizer_options: tuple[str, ...] = ()
    """Options of the optimizer, as key=value: retraction=r1 tangent=false for muon."""
    retract_every: int = 0
    """With sgd and adamw: move the weights of AOL layers back to orthogonality after every N-th step, and leave the
    rescaling out of the steps between (onelip.optim.retract_after): a step costs about as much as that of the plain
    network. 16 lost nothing in half an epoch at the learning rate of the paper; 4 at 0.01 lost 2.6 points of certified
    accuracy in three epochs. 0 for never."""
    products: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the products of matrices that muon and --retract-every add to a step; auto measures which is faster on
    this machine, once, before the first step."""
    lr: float = 1e-3
    """Learning rate; its peak with the one-cycle schedule."""
    momentum: float = 0.9
    """Momentum of sgd and muon, and the first beta of adamw."""
    nesterov: bool = True
    """Use Nesterov momentum in sgd; muon always does."""
    weight_decay: float = 1e-3
    """Weight decay, for the weights of linear layers only; weight_decay * P is added to the gradient."""
    gradient_clip: float = 0.0
    """Clip the norm of the gradient of all parameters to this value before each step; 0 to switch off."""
    ema: float = 0.0
    """Evaluate and save an exponential moving average of the weights, with this decay, such as 0.999; 0 for none."""
    schedule: Literal["steps", "one-cycle"] = "steps"
    """steps: drops at given fractions of the run; one-cycle: linear warm-up from 0, linear decay to 0."""
    drop_at: tuple[float, ...] = (0.9, 0.99, 0.999)
    """Schedule steps: fractions of the run after which the learning rate drops."""
    drop_factor: float = 0.1
    """Schedule steps: factor of each drop."""
    warmup: float = 0.3
    """Schedule one-cycle: fraction of the run in which the learning rate rises."""

    augment: bool = True
    """Augment the training images."""
    hue: float = 0.02
    """Largest change of the hue, as a fraction of the colour circle."""
    saturation: tuple[float, float] = (0.3, 2.0)
    """Range of the saturation factor."""
    brightness: float = 0.1
    """Largest change of the brightness."""
    contrast: tuple[float, float] = (0.5, 2.0)
    """Range of the contrast factor."""
    rotation: float = 5.0
    """Largest rotation in degrees."""
    translation: float = 0.1
    """Largest shift, as a fraction of the image."""
    flip: float = 0.5
    """Probability of a horizontal flip."""
    interpolations: Literal["two", "one", "none"] = "two"
    """Interpolate rotation and translation one after the other, as the paper does, or both at once; or none: translate
    by whole pixels, which is faster."""

    device: str = "auto"
    """cpu, cuda, cuda:1, mps; auto uses a GPU if there is one."""
    threads: int = 0
    """Threads of a process on the CPU; 0 for torch's own choice."""
    channels_last: bool = True
    """Use the channels-last memory layout for images and kernels, which is faster."""
    compile: bool = False
    """Use torch.compile; worthwhile only for long runs."""
    bf16: bool = False
    """Train with bfloat16 autocast; evaluation is always in float32."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            object.__setattr__(self, field.name, _check_type(field.name, value, field.type))
        for name, low, high in (
            ("epochs", 1, 10**9),
            ("evaluate_every", 1, 10**9),
            ("batch_size", 1, 10**9),
            ("accumulate", 1, 10**9),
            ("retract_every", 0, 10**9),
            ("seed", 0, 2**63 - 1),
            ("threads", 0, 4096),
            ("momentum", 0, 1),
            ("weight_decay", 0, 1e9),
            ("gradient_clip", 0, 1e9),
            ("drop_factor", 0, 1),
            ("warmup", 0, 1),
        ):
            if not low <= getattr(self, name) <= high:
                wanted = f"of at least {low}" if high >= 1e9 else f"from {low} to {high:g}"
                raise RecipeError(f"expected {name} {wanted}, got {getattr(self, name)!r}")
        for name in ("lr", "temperature", "teacher_temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise RecipeError(f"expected {name} to be positive, got {getattr(self, name)!r}")
        if self.optimizer != "sgd" and self.momentum == 1:
            raise RecipeError(f"expected momentum below 1 for {self.optimizer}, got 1")
        if self.optimizer == "muon" and self.retract_every:
            raise RecipeError("muon has its own retraction; use --optimizer-options every=N instead of --retract-every")
        if self.image_size != "original" and self.resize_to is None:
            raise RecipeError(
                f'expected image_size to be "original", N or HEIGHTxWIDTH, such as 64 or 48x64, got {self.image_size!r}'
            )
        if not math.isfinite(self.offset):
            raise RecipeError(f"expected a finite offset, got {self.offset!r}")
        if not 0 <= self.ema < 1:
            raise RecipeError(f"expected ema from 0 to below 1, got {self.ema!r}; 0.999 averages about 1000 steps")
        if self.accumulate > self.batch_size:
            raise RecipeError(f"expected accumulate of at most batch_size, {self.batch_size}, got {self.accumulate}")
        if not 0 <= self.validation < 1:
            raise RecipeError(f"expected validation from 0 to below 1, got {self.validation!r}; 0.1 is a tenth")
        if not 0 < self.epoch_part <= 1:
            raise RecipeError(f"expected epoch_part above 0 and at most 1, got {self.epoch_part!r}; for example 0.5")
        if not all(0 <= part <= 1 for part in self.drop_at):
            raise RecipeError(f"expected drop_at as fractions of the run from 0 to 1, got {self.drop_at!r}")
        if self.optimizer == "sgd" and self.nesterov and self.momentum == 0:
            raise RecipeError("nesterov needs a momentum above 0; set momentum, or switch nesterov off")
        for name in ("model_options", "method_options", "loss_options", "optimizer_options"):
            for option in getattr(self, name):
                if not option.partition("=")[0].isidentifier() or "=" not in option:
                    raise RecipeError(f"expected {name} as key=value, got {option!r}; for example width=8")

    @property
    def resize_to(self) -> tuple[int, int] | None:
        """(height, width) that images are resized to; None to keep their size.

        Examples:
            >>> Recipe(image_size="48x64").resize_to
            (48, 64)
        """
        if not (found := re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", self.image_size)):
            return None
        height, width = found.groups()
        return int(height), int(width or height)

    def replace(self, **changes: Any) -> Self:
        """A copy with other values."""
        return dataclasses.replace(self, **changes)

    def check_resumes(self, kept: Self) -> None:
        """Raise an error if a run of the recipe `kept` cannot be resumed with this one.

        Only the machine may differ, and the path of the data: their fingerprint shows whether they are the same.
        """
        for field in dataclasses.fields(self):
            before, now = getattr(kept, field.name), getattr(self, field.name)
            if field.name == "data" and known_name(self.data) is None:
                continue
            if before != now and field.name not in MACHINE_FIELDS:
                raise RecipeError(
                    f"the run has --{field.name.replace('_', '-')} {before!r}, got {now!r}; omit the option to resume "
                    "it, or start a new run from its weights: --start-from instead of --resume"
                )

    def to_json(self) -> dict[str, Any]:
        """All fields and the version, as JSON values.

        Examples:
            >>> Recipe.from_json(Recipe(epochs=3).to_json()) == Recipe(epochs=3)
            True
        """
        fields = {key: list(v) if isinstance(v, tuple) else v for key, v in dataclasses.asdict(self).items()}
        return {"version": VERSION, **fields}

    @classmethod
    def from_json(cls, content: object) -> Self:
        """The recipe that `to_json` wrote.

        Raises:
            RecipeError: for anything else.
        """
        if not isinstance(content, Mapping):
            raise RecipeError(f"expected a recipe as a JSON object, got {type(content).__name__}")
        version = content.get("version")
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise RecipeError(f"expected a recipe with a version, got version {version!r}; this is not a onelip recipe")
        if version != VERSION:
            raise RecipeError(
                f"expected a recipe of version {VERSION}, got version {version}; use the onelip that wrote it"
            )
        names = [field.name for field in dataclasses.fields(cls)]
        given = {key: value for key, value in content.items() if key != "version"}
        for key in given:
            if key not in names:
                raise RecipeError(f"a recipe has no field {key!r}{did_you_mean(str(key), names)}")
        if missing := [name for name in names if name not in given and name not in LATER_FIELDS]:
            raise RecipeError(f"the recipe lacks the fields {', '.join(missing)}")
        return cls(**given)


def parse_options(options: tuple[str, ...]) -> dict[str, Any]:
    """Options of models, methods and losses: key=value, with JSON values or `inf` where possible, else strings.

    Examples:
        >>> parse_options(("width=8", "side=auto", "learn_weights=true", "p=inf"))
        {'width': 8, 'side': 'auto', 'learn_weights': True, 'p': inf}
    """
    found: dict[str, Any] = {}
    for option in options:
        key, _, text = option.partition("=")
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = math.inf if text == "inf" else text
    return found


def _check_type(name: str, value: object, expected: Any) -> object:
    """The value with the type of its field (an int becomes a float, a list a tuple); an error if it does not fit."""
    if expected is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if expected is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if expected in (bool, str) and isinstance(value, expected):
        return value
    if get_origin(expected) is Literal:
        choices = get_args(expected)
        if value in choices:
            return value
        listed = " or ".join(map(repr, choices))
        raise RecipeError(f"expected {name} to be {listed}, got {value!r}{did_you_mean(str(value), choices)}")
    if get_origin(expected) is tuple and isinstance(value, list | tuple):
        item, rest = get_args(expected)
        if rest is Ellipsis or len(value) == len(get_args(expected)):
            return tuple(_check_type(f"{name}[{i}]", v, item) for i, v in enumerate(value))
    raise RecipeError(f"expected {name} to be {_format_type(expected)}, got {value!r}")


def _format_type(expected: Any) -> str:
    if get_origin(expected) is tuple:
        item, rest = get_args(expected)
        count = "" if rest is Ellipsis else f"{len(get_args(expected))} "
        return f"a list of {count}values, each {_format_type(item)}"
    return {float: "a number", int: "an integer", bool: "true or false", str: "a string"}[expected]


# As published: AOL-Small on CIFAR-10, 1000 epochs.
_PAPER = Recipe()

_COLOURS_UNCHANGED: dict[str, Any] = {
    "hue": 0.0,
    "saturation": (1.0, 1.0),
    "brightness": 0.0,
    "contrast": (1.0, 1.0),
}

# Network and optimizer of the paper, within about an hour on two cores. So few passes do not overfit, so colours are
# unchanged and images only flipped and shifted; one cycle lets the learning rate end at zero. Learning rate and
# offset were chosen on validation images, with a third of the channels and two epochs
# (results/paper_short_trials.json): noise in P costs AOL norm in every layer, so a higher rate trains worse, and a
# smaller offset asks for less margin than can be reached.
_PAPER_SHORT = Recipe(
    epochs=5,
    offset=1.0,
    lr=5e-3,
    schedule="one-cycle",
    warmup=0.25,
    weight_decay=0.0,
    **_COLOURS_UNCHANGED,
    rotation=0.0,
)

# The digits in the package, in about a minute on two cores. Learning rate, batch size, offset and weight decay were
# chosen on a validation split: a smaller offset than the paper's is better at the small radii, and shifting or rotating
# images as small as 8x8 costs accuracy.
_DIGITS = Recipe(
    data="digits",
    model="patchwise-tiny",
    epochs=35,
    batch_size=25,
    offset=1.0,
    lr=0.1,
    schedule="one-cycle",
    augment=False,
    threads=1,  # so small a network gains nothing by a second one, and loses much on a busy machine
)

# Runs of a budget of time (--budget): see results/fast_training.json.
_FAST = Recipe(
    batch_size=500,
    offset=1.0,
    optimizer="muon",
    momentum=0.8,
    schedule="one-cycle",
    warmup=0.15,
    weight_decay=0.0,
    **_COLOURS_UNCHANGED,
    rotation=0.0,
    interpolations="none",
)

# For runs that are long enough to fit the training images better than others (results/few_images.json).
_COLOURS: dict[str, Any] = {
    "hue": 0.02,
    "saturation": (0.7, 1.3),
    "brightness": 0.1,
    "contrast": (0.8, 1.2),
}

# Smallest budget in seconds, on two cores: the network, the learning rate and the augmentation.
_BY_BUDGET: tuple[tuple[float, dict[str, Any]], ...] = (
    (0.0, {"model": "aol-fast-small", "lr": 0.08, "translation": 0.0625}),
    (90.0, {"model": "aol-fast-medium", "lr": 0.06, "translation": 0.0625}),
    (1200.0, {"model": "aol-fast-large", "lr": 0.06, "translation": 0.094, **_COLOURS}),
    (2700.0, {"model": "aol-fast-huge", "lr": 0.05, "translation": 0.094, **_COLOURS}),
)
_GPU_SPEED = 30.0  # a GPU relative to two cores; assumed, not measured


_NOT_MIRRORED = ("digits", "mnist")  # a mirrored digit is not a digit


def recipe_for_budget(seconds: float, data: str = "cifar10") -> Recipe:
    """The recipe for a budget of time, without its number of epochs (see `onelip.training.budget`).

    Args:
        seconds: the budget.
        data: name or path of the data. Images of digits are not mirrored.

    Examples:
        >>> recipe_for_budget(20).model, recipe_for_budget(600).model
        ('aol-fast-small', 'aol-fast-medium')
        >>> recipe_for_budget(20).flip, recipe_for_budget(20, "mnist").flip
        (0.5, 0.0)
        >>> recipe_for_budget(20).hue, recipe_for_budget(3600).hue  # only long runs change colours
        (0.0, 0.02)
    """
    flip = 0.0 if known_name(data) in _NOT_MIRRORED else _FAST.flip
    return _FAST.replace(**_row(seconds), data=data, flip=flip)


def is_fast(model: str) -> bool:
    """Whether a name is that of a network for budgets, of the family aol-fast."""
    return model.replace("_", "-").startswith("aol-fast-")


# Peak learning rates by optimizer and for networks of the family or others, such as aol-small, with AOL: the best in
# results/methods_by_time.json and results/paper_optimizers.json; for muon, whose best is 0.08 in 20 seconds, the rate
# of ten minutes. That of adamw for other networks was not measured.
_RATES = {
    ("muon", True): 0.06,
    ("sgd", True): 0.9,
    ("adamw", True): 0.003,
    ("muon", False): 0.005,
    ("sgd", False): 0.01,
    ("adamw", False): 0.001,
}


def for_choices(recipe: Recipe, model: str | None, optimizer: str | None) -> Recipe:
    """The recipe of a budget for another network or optimizer: the learning rate depends on both.

    Examples:
        >>> for_choices(recipe_for_budget(600), "aol-small", None).lr
        0.005
        >>> for_choices(recipe_for_budget(600), None, "sgd").lr
        0.9
    """
    model, optimizer = model or recipe.model, optimizer or recipe.optimizer
    is_same = optimizer == recipe.optimizer and is_fast(model) == is_fast(recipe.model)
    if is_same or (optimizer, True) not in _RATES:  # an unknown optimizer is refused with the other options
        return recipe.replace(model=model)
    momentum = 0.8 if optimizer == "muon" else 0.9
    return recipe.replace(model=model, optimizer=optimizer, lr=_RATES[optimizer, is_fast(model)], momentum=momentum)


def changed_fields(recipe: Recipe, seconds: float) -> set[str]:
    """The names of the fields that differ from `recipe_for_budget`.

    Examples:
        >>> changed_fields(recipe_for_budget(20).replace(lr=0.1), 20)
        {'lr'}
    """
    usual = recipe_for_budget(seconds, recipe.data)
    return {f.name for f in dataclasses.fields(recipe) if getattr(recipe, f.name) != getattr(usual, f.name)}


def for_gpu(recipe: Recipe, seconds: float, kept: Collection[str] = ()) -> Recipe:
    """The recipe of a budget with the network for a GPU, which is larger; unchanged if options chose another one.

    Args:
        recipe: the recipe of the budget, or another one.
        seconds: the budget.
        kept: names of fields that were chosen.

    Examples:
        >>> [for_gpu(recipe_for_budget(20), 20, kept).model for kept in ((), ("model",))]
        ['aol-fast-medium', 'aol-fast-small']
    """
    if "model" in kept or "model_options" in kept:
        return recipe
    row = _row(seconds * _GPU_SPEED)
    if recipe.optimizer != "muon":
        del row["lr"]  # that of another optimizer or method
    return recipe.replace(**{name: value for name, value in row.items() if name not in kept})


def _row(seconds: float) -> dict[str, Any]:
    return dict([changes for start, changes in _BY_BUDGET if seconds >= start][-1])


def parse_seconds(text: str) -> float:
    """Seconds of a time such as 30s, 10m, 1.5h or 1h30m.

    Examples:
        >>> parse_seconds("10m"), parse_seconds("1h30m")
        (600.0, 5400.0)
    """
    part = r"(\d+(?:\.\d+)?)([smh])"
    wanted = text.strip().lower()
    if re.fullmatch(f"(?:{part})+", wanted):
        seconds = sum(float(number) * {"s": 1, "m": 60, "h": 3600}[unit] for number, unit in re.findall(part, wanted))
        if 0 < seconds < math.inf:
            return seconds
    raise RecipeError(f"expected a budget of time such as 30s, 10m or 1h30m, got {text!r}")


def format_seconds(seconds: float) -> str:
    """A time as `parse_seconds` reads it.

    Examples:
        >>> format_seconds(0.4), format_seconds(600), format_seconds(5400)
        ('1s', '10m', '1h30m')
    """
    whole = max(1, round(seconds))
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    return "".join(f"{n}{unit}" for n, unit in ((hours, "h"), (minutes, "m"), (rest, "s")) if n)


# About ten minutes on two cores (results/fast_training.json, 70 epochs): a budget of ten minutes without its timing, so
# that it is the same recipe on every machine.
_SHORT = recipe_for_budget(600).replace(epochs=70, evaluate_every=10)

# A plain network whose labels a network of constant 1 learns from (--teacher); cross-entropy without an offset.
_TEACHER = Recipe(
    model="cnn-teacher",
    epochs=20,
    offset=0.0,
    temperature=1.0,
    lr=0.15,
    schedule="one-cycle",
    warmup=0.2,
    translation=0.094,
    **_COLOURS,
    rotation=0.0,
    interpolations="none",
)

PRESETS = {"paper": _PAPER, "paper-short": _PAPER_SHORT, "short": _SHORT, "digits": _DIGITS, "teacher": _TEACHER}


def preset(name: str) -> Recipe:
    """A recipe by its name: one of `PRESETS`.

    Examples:
        >>> preset("paper").epochs
        1000
    """
    check_known("preset", name, PRESETS)
    return PRESETS[name]


DEFAULT_BUDGET = "10m"  # of runs that name no preset, epochs or budget


def default_preset(data: str | None, model: str | None) -> str | None:
    """The preset of a run that names none; None for a budget of time.

    The digits have their own preset, and so has cnn-teacher. On a named data set, the architectures of the paper and
    registered models have the recipe of the paper.

    Examples:
        >>> default_preset("cifar10", None), default_preset("cifar10", "aol-small"), default_preset(None, None)
        (None, 'paper', 'digits')
    """
    if model is not None and model.replace("_", "-") == "cnn-teacher":
        return "teacher"
    if data in (None, "digits"):
        return "digits"
    is_other = model is not None and not is_fast(model)
    return "paper" if is_other and known_name(data) is not None else None
