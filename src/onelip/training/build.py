"""Build the network of a recipe, and load the network and the data of a run directory."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from onelip.certification.predict import Mode
from onelip.certification.proof import Progress, Proof
from onelip.core.bake import bake
from onelip.core.errors import RecipeError, RunError, check_known, did_you_mean
from onelip.core.imports import defining_modules, import_modules
from onelip.data import DataError, DataNotFound, ImageData, NewImages, load_data, load_images, validation_split
from onelip.losses.registry import find_loss, list_losses
from onelip.methods.registry import list_methods, options_of as options_of_method
from onelip.models import create_model, list_models
from onelip.models.registry import model_builder, model_options
from onelip.training.checkpoint import load_checkpoint, read_header, read_tensors, write_tensors
from onelip.training.evaluation import Constants, find_constants
from onelip.training.learner import WeightAverage, set_layout
from onelip.training.objective import resolve_method
from onelip.training.prediction import Predictions, predict
from onelip.training.recipe import Recipe, parse_options
from onelip.training.run_directory import RunConfig, RunDirectory, read_config

WEIGHTS_FORMAT = "onelip weights 1"
PLAIN_FORMAT = "onelip plain weights 1"


def build_model(recipe: Recipe, num_classes: int, shape: tuple[int, int, int]) -> nn.Module:
    """Build the network of a recipe, initialised from torch's random generator.

    Args:
        recipe: the recipe.
        num_classes: number of classes.
        shape: shape of an image (channels, height, width).

    Returns:
        The network in training mode, on the CPU.

    Raises:
        RecipeError: if the model or method is unknown, or an option is invalid.

    Examples:
        >>> model = build_model(Recipe(model="patchwise-tiny"), 10, (1, 8, 8))
        >>> model(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    methods = ["default", "none", *list_methods()]
    for kind, name, known in (("model", recipe.model, list_models()), ("method", recipe.method, methods)):
        check_known(kind, name, known)
    options = parse_options(recipe.model_options)
    if recipe.method != "default":
        options["method"] = None if recipe.method == "none" else recipe.method
    if recipe.method_options:
        options["method_options"] = parse_options(recipe.method_options)
    channels, height, width = shape
    try:
        return create_model(
            recipe.model,
            num_classes=num_classes,
            image_size=(height, width),
            in_channels=channels,
            **options,
        )
    except ValueError as error:  # unsupported sizes, option values or layers
        raise RecipeError(str(error)) from error
    except TypeError as error:  # unknown options
        what = _unknown_option(recipe) or f"options of {recipe.model} or its method are invalid: {error}"
        raise RecipeError(what) from error


def _unknown_option(recipe: Recipe) -> str | None:
    """Message about the first unknown option of the model or its method; None if all are known."""
    of_model = [name for name in model_options(recipe.model) if name not in ("method", "method_options")]
    owners = [("model_options", recipe.model, of_model)]
    if (method := resolve_method(recipe)) is not None:
        owners.append(("method_options", method.name, [option.name for option in options_of_method(method)]))
    for kind, owner, names in owners:
        for option in parse_options(getattr(recipe, kind)):
            if option not in names:
                known = ", ".join(names)
                return f"{owner} has no option {option!r}; its {kind}: {known}{did_you_mean(option, names)}"
    return None


def build_plain(config: RunConfig) -> nn.Module:
    """Build the plain network of a config on the meta device, without weights.

    Fill it with `load_state_dict(tensors, assign=True)` and call `set_layout`. An untrusted config may describe a
    network of any size; this costs no memory.

    Raises:
        RecipeError: if the config builds no network.
    """
    with torch.device("meta"):
        return bake(build_model(config.recipe, len(config.class_names), config.shape))


def _fingerprint(network: nn.Module) -> str:
    """A hash of all tensors of a network."""
    found = hashlib.sha256()
    for name, tensor in network.state_dict().items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


@dataclass(frozen=True)
class LoadedRun:
    """The network of a run, from `load_run`.

    Attributes:
        directory: the run directory.
        config: recipe and data of the run.
        plain: the baked network, which is evaluated, proved and exported.
        is_finished: True for the final weights, False for those of the last checkpoint.
    """

    directory: RunDirectory
    config: RunConfig
    plain: nn.Module
    is_finished: bool
    _constants: dict[str, Constants] = field(default_factory=dict, init=False, repr=False, compare=False)
    _proofs: list[Proof] = field(default_factory=list, init=False, repr=False, compare=False)  # the last of `predict`

    @cached_property
    def model(self) -> nn.Module:
        """The network as it was trained, with its parametrizations; loaded on first use."""
        model = _build(self.directory, self.config)
        _fill(model, self.directory.weights, WEIGHTS_FORMAT)
        return model.eval()

    @property
    def constants(self) -> Constants:
        """Lipschitz constants of `plain` in real arithmetic; computed again only if its weights have changed."""
        weights = _fingerprint(self.plain)
        if weights not in self._constants:
            self._constants.clear()
            self._constants[weights] = find_constants(
                self.model, self.plain, self.config.recipe, self.config.shape, effort="high"
            )
        return self._constants[weights]

    @property
    def lipschitz(self) -> float | None:
        """The constant of the map from the image to the scores; None if none is proved."""
        return self.constants.total

    def predict(
        self,
        images: Tensor | str | PathLike[str] | Iterable[str | PathLike[str]],
        *,
        resize: bool = False,
        skip_bad: bool = False,
        mode: Mode | None = None,
        batch_size: int = 250,
        progress: Progress | None = None,
    ) -> Predictions:
        """Predict the class of new images, with a certified radius for each. `onelip predict` does the same.

        The first call proves the network; later calls use its proof again.

        Args:
            images: a tensor (N, C, H, W), uint8 or floats in [0, 1]; or one or several paths: image files, folders of
                image files, glob patterns, .npz files with the uint8 array `images`.
            resize: resize files of another image size instead of raising an error. The radius is then for the resized
                image. A run that resized its own images (`--image-size`) always does this.
            skip_bad: skip unusable files instead of raising an error; `Predictions.skipped` lists them.
            mode: "sound" includes all rounding errors, "real-arithmetic" does not. None takes "sound" if it can be
                proved; `Predictions.mode` is the mode that was taken.
            batch_size: images at a time; changes speed and memory only.
            progress: called with the work done, all work, and its name.

        Returns:
            A sequence of predictions with `image`, `class_name`, `radius` and `pixels`.

        Raises:
            DataError: if an image cannot be used.
            ProofError: if no Lipschitz constant of the network is proved.

        Examples:
            Not executed here:

                run = onelip.load_run("runs/first")
                for found in run.predict(["a.png", "photos/"]):
                    print(found.image, found.class_name, found.radius)
        """
        if not isinstance(images, Tensor):
            resize = resize or self.config.recipe.resize_to is not None
            new = load_images(images, self.config.shape, resize=resize, skip_bad=skip_bad)
        elif images.shape[1:] == self.config.shape:
            new = NewImages(images, tuple(map(str, range(len(images)))), (None,) * len(images))
        else:
            raise DataError(
                f"expected images of shape (N, {', '.join(map(str, self.config.shape))}), got {tuple(images.shape)}"
            )
        proof = self._proofs[0] if self._proofs else None
        names = self.config.class_names
        found = predict(self.plain, new, names, mode=mode, proof=proof, batch_size=batch_size, progress=progress)
        if found.mode == "sound" and found.certification.proof is not None:
            self._proofs[:] = [found.certification.proof]
        return found


def save_weights(run: RunDirectory, model: nn.Module, plain: nn.Module) -> None:
    """Write weights.safetensors and plain.safetensors."""
    write_tensors(run.weights, model.state_dict(), {"format": WEIGHTS_FORMAT})
    write_tensors(run.plain, plain.state_dict(), {"format": PLAIN_FORMAT})


def load_run(path: str | Path) -> LoadedRun:
    """Load the network of a run directory, on the CPU: its final weights, or those of the last checkpoint.

    The plain network of a finished run has the stored weights bit for bit.

    Args:
        path: the run directory.

    Returns:
        The network as it was trained, the plain network, and the config.

    Raises:
        RunError: if the path contains no run, or its files cannot be used.

    Examples:
        Prove and certify the network of a run (not executed here):

            run = onelip.load_run("runs/first")
            found = run.predict("photos/")
            certified = onelip.certify(run.plain.double(), images, labels)
    """
    run = RunDirectory(path)
    config = read_config(run)
    import_needed(config, run)
    if run.plain.exists() and run.weights.exists():
        with _config_errors(run):
            plain = build_plain(config)
        _fill(plain, run.plain, PLAIN_FORMAT)
        set_layout(plain, config.recipe)
        return LoadedRun(run, config, plain.eval(), is_finished=True)
    model = _build(run, config)
    average = WeightAverage(model, config.recipe.ema) if config.recipe.ema else None
    load_checkpoint(run.checkpoint, model, average=average)
    model = model if average is None else average.model
    plain = bake(model)
    set_layout(plain, config.recipe)  # baking may have created layers
    loaded = LoadedRun(run, config, plain.eval(), is_finished=False)
    loaded.__dict__["model"] = model.eval()  # a later checkpoint may have replaced the file
    return loaded


def _build(run: RunDirectory, config: RunConfig) -> nn.Module:
    with _config_errors(run):
        model = build_model(config.recipe, len(config.class_names), config.shape)
    set_layout(model, config.recipe)
    return model


@contextmanager
def _config_errors(run: RunDirectory) -> Iterator[None]:
    try:
        yield
    except RecipeError as error:
        raise RunError(f"{run.config}: {error}") from error


def import_needed(config: RunConfig, run: RunDirectory, *, is_trained: bool = False) -> None:
    """Import the modules that register the model, the method and the loss of a run, if they are not registered.

    Args:
        config: of the run.
        run: its directory, for messages.
        is_trained: whether the run is trained further, so that its loss is needed.

    Raises:
        RunError: if a module cannot be imported.
    """
    recipe = config.recipe
    is_known = model_builder(recipe.model) is not None and recipe.method in ("default", "none", *list_methods())
    if is_known and (not is_trained or ":" in recipe.loss or recipe.loss in ("default", *list_losses())):
        return
    try:
        import_modules(config.imports)
    except RecipeError as error:
        raise RunError(f"{run.path}: {error}") from error


def find_imports(recipe: Recipe) -> tuple[str, ...]:
    """Return the modules outside of onelip that register the model, the method and the loss of a recipe."""
    builder, method = model_builder(recipe.model), resolve_method(recipe)
    loss = find_loss(recipe.loss) if recipe.loss in list_losses() else None
    return defining_modules(*(thing for thing in (builder, method and method.apply, loss) if thing is not None))


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Copy the weights of a run into a network.

    Raises:
        RecipeError: if the network is another one.
    """
    state = load_run(path).model.state_dict()
    try:
        model.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        what = [line.strip() for line in str(error).splitlines()]
        raise RecipeError(
            f"the weights of {path} do not fit this network ({what[min(1, len(what) - 1)]}); use its model, method, "
            "image size and number of classes"
        ) from error


def check_same_images(option: str, kept: RunConfig, recipe: Recipe, data: ImageData) -> None:
    """Check that the images of another run, which an option names, fit those of a new run.

    Raises:
        RecipeError: if they have another shape or another number of classes, or if the other run was trained on the
            validation images of the new one.
    """
    if kept.shape != data.shape:
        before, now = ("x".join(map(str, shape)) for shape in (kept.shape, data.shape))
        size = f"; --image-size {kept.shape[1]}x{kept.shape[2]} resizes them" if kept.shape[0] == data.shape[0] else ""
        raise RecipeError(f"{option}: that run has images of {before} pixels, and {data.name} of {now}{size}")
    if len(kept.class_names) != data.num_classes:
        raise RecipeError(
            f"{option}: that run has {len(kept.class_names)} classes, and {data.name} has {data.num_classes}; the "
            "last layer does not fit"
        )
    if recipe.validation and kept.fingerprint == data.fingerprint and kept.recipe.validation != recipe.validation:
        raise RecipeError(
            f"{option}: that run was trained on validation images of this one; train it with --validation "
            f"{recipe.validation:g} as well"
        )


def _fill(model: nn.Module, path: Path, format: str) -> None:
    """Replace the tensors of a model, which may be on the meta device, by those of a file."""
    model.load_state_dict(read_tensors(path, read_header(path, format), model.state_dict()), assign=True)


def split_data(recipe: Recipe, data: ImageData) -> ImageData:
    """The data that a run trains and evaluates on; with `recipe.validation` a part is held out as test images."""
    return validation_split(data, recipe.validation) if recipe.validation else data


def load_run_data(config: RunConfig, root: str | Path | None = None, advice: str = "") -> ImageData:
    """Load the data of a run.

    Args:
        config: configuration of the run.
        root: directory of named data sets; by default that of the run.
        advice: ending of the error message if the data of the run have changed.

    Raises:
        RunError: if the data are missing, or not those of the run.
    """
    try:
        data = load_data(config.recipe.data, root or config.data_root, image_size=config.recipe.resize_to)
    except DataNotFound as error:
        raise RunError(f"the data of the run are missing: {error}") from error  # not a usage error
    if data.fingerprint != config.fingerprint:
        raise RunError(
            f"{data.source}: these are not the data of the run (fingerprint {data.fingerprint[:12]}…, not "
            f"{config.fingerprint[:12]}…){advice}"
        )
    return data
