"""The recipe: one frozen record that is the flags of `onelip train`, and the config that a run keeps.

The defaults are the paper's (section Experiments; appendix, Data augmentation). No torch here: the command line reads
this file to answer `--help`.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from onelip.data._places import known_name
from onelip.training._fields import check_type, suggestion
from onelip.training.errors import RecipeError

VERSION = 1  # goes up when a field changes its meaning; older runs are then read by what knows both

# What may differ when a run is gone on with elsewhere; the numbers then agree up to rounding only.
MACHINE_FIELDS = ("device", "threads", "compile", "channels_last")

# What recipes of this version may lack, since it came later; such runs did what the default does.
LATER_FIELDS = ("gradient_clip",)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a run computes."""

    data: str = "cifar10"
    """Name of a data set (see `onelip data`), or a path: .npz, folder of images by class, official files."""
    model: str = "aol-small"
    """Name of an architecture; see `onelip models`."""
    method: str = "default"
    """Name of a method (see `onelip methods`), "none" for plain layers, "default" for the model's own."""
    model_options: tuple[str, ...] = ()
    """What else the model knows, as key=value: width=8 convs=3."""
    method_options: tuple[str, ...] = ()
    """Options of the method, as key=value: side=auto steps=2."""
    epochs: int = 1000
    """How often all images are seen."""
    batch_size: int = 250
    """Images in a step, over all processes."""
    seed: int = 0
    """Decides the first weights, the order and the augmentation."""
    validation: float = 0.0
    """Part of the training images that is held out; choose by it, and report by the test images."""

    offset: float = math.sqrt(2)
    """u of the loss: the margin that is asked for."""
    temperature: float = 0.25
    """t of the loss."""
    lr: float = 1e-3
    """Learning rate of SGD; its highest value if the schedule is one-cycle."""
    momentum: float = 0.9
    """Momentum of SGD."""
    nesterov: bool = True
    """Momentum in the manner of Nesterov."""
    weight_decay: float = 1e-3
    """Added to the gradient as weight_decay * P, for the weights of linear layers only (TensorFlow's l2 of half)."""
    gradient_clip: float = 0.0
    """Make the gradient of all parameters together at most this long before each step; 0 leaves it as it is."""
    schedule: Literal["steps", "one-cycle"] = "steps"
    """steps: drops at given parts of the run; one-cycle: up from 0 and down to 0, both straight."""
    drop_at: tuple[float, ...] = (0.9, 0.99, 0.999)
    """Steps: parts of the run after which the learning rate drops."""
    drop_factor: float = 0.1
    """Steps: what it is multiplied with."""
    warmup: float = 0.3
    """One-cycle: part of the run in which the learning rate rises."""

    augment: bool = True
    """Whether to augment the training images at all."""
    hue: float = 0.02
    """Turn the hue by up to this part of the circle."""
    saturation: tuple[float, float] = (0.3, 2.0)
    """Range of factors of the saturation."""
    brightness: float = 0.1
    """Add up to this much."""
    contrast: tuple[float, float] = (0.5, 2.0)
    """Range of factors of the contrast."""
    rotation: float = 5.0
    """Turn by up to so many degrees."""
    translation: float = 0.1
    """Shift by up to this part of the image."""
    flip: float = 0.5
    """Probability of mirroring."""
    interpolations: Literal["two", "one"] = "two"
    """Interpolate for rotation and translation in turn, as the paper does, or once for both."""

    device: str = "auto"
    """cpu, cuda, cuda:1, mps; auto takes a GPU if there is one."""
    threads: int = 0
    """Threads of a process on the CPU; 0 leaves it to torch."""
    channels_last: bool = True
    """Memory layout of images and kernels; the faster one."""
    compile: bool = False
    """Use torch.compile; pays only where steps are many."""
    bf16: bool = False
    """Train under bfloat16 autocast; evaluation is always in float32."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            object.__setattr__(self, field.name, check_type(field.name, value, field.type))
        for name, low, high in (
            ("epochs", 1, 10**9),
            ("batch_size", 1, 10**9),
            ("seed", 0, 2**63 - 1),
            ("threads", 0, 4096),
            ("momentum", 0, 1),
            ("weight_decay", 0, 1e9),
            ("gradient_clip", 0, 1e9),
            ("drop_factor", 0, 1),
            ("warmup", 0, 1),
        ):
            if not low <= getattr(self, name) <= high:
                raise RecipeError(f"expected {name} from {low} to {high:g}, got {getattr(self, name)!r}")
        for name in ("lr", "temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise RecipeError(f"expected {name} to be positive, got {getattr(self, name)!r}")
        if not math.isfinite(self.offset):
            raise RecipeError(f"expected a finite offset, got {self.offset!r}")
        if not 0 <= self.validation < 1:
            raise RecipeError(f"expected validation from 0 to below 1, got {self.validation!r}; 0.1 is a tenth")
        if not all(0 <= part <= 1 for part in self.drop_at):
            raise RecipeError(f"expected drop_at as parts of the run between 0 and 1, got {self.drop_at!r}")
        if self.nesterov and self.momentum == 0:
            raise RecipeError("expected momentum above 0 with nesterov, got 0; switch nesterov off")
        for name in ("model_options", "method_options"):
            for option in getattr(self, name):
                if not option.partition("=")[0].isidentifier() or "=" not in option:
                    raise RecipeError(f"expected {name} as key=value, got {option!r}; for example width=8")

    def replace(self, **changes: Any) -> Self:
        """A copy with other values."""
        return dataclasses.replace(self, **changes)

    def check_continues(self, kept: Self) -> None:
        """Refuse to go on with a run by another recipe than its own.

        Only the machine may be another, and the path of the data: whether they are the same is for their fingerprint.
        """
        for field in dataclasses.fields(self):
            before, now = getattr(kept, field.name), getattr(self, field.name)
            if field.name == "data" and known_name(self.data) is None:
                continue
            if before != now and field.name not in MACHINE_FIELDS:
                raise RecipeError(
                    f"expected the run's own --{field.name.replace('_', '-')} {before!r}, got {now!r}; leave it as it "
                    "is, or start a new run"
                )

    def to_json(self) -> dict[str, Any]:
        """All fields and the version, as JSON takes them.

        Example:
            >>> Recipe.from_json(Recipe(epochs=3).to_json()) == Recipe(epochs=3)
            True
        """
        fields = {key: list(v) if isinstance(v, tuple) else v for key, v in dataclasses.asdict(self).items()}
        return {"version": VERSION, **fields}

    @classmethod
    def from_json(cls, content: object) -> Self:
        """The recipe of `to_json`; anything else is refused."""
        if not isinstance(content, Mapping):
            raise RecipeError(f"expected a recipe as a JSON object, got {type(content).__name__}")
        version = content.get("version")
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise RecipeError(f"expected a recipe with a version, got version {version!r}; it is no onelip recipe")
        if version != VERSION:
            raise RecipeError(
                f"expected a recipe of version {VERSION}, got version {version}; use the onelip that wrote it"
            )
        names = [field.name for field in dataclasses.fields(cls)]
        given = {key: value for key, value in content.items() if key != "version"}
        for key in given:
            if key not in names:
                raise RecipeError(f"expected the fields of a recipe, got {key!r}{suggestion(str(key), names)}")
        if missing := [name for name in names if name not in given and name not in LATER_FIELDS]:
            raise RecipeError(f"expected all fields of a recipe, got none of {', '.join(missing)}")
        return cls(**given)
