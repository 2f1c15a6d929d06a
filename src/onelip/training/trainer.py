"""Training, from top to bottom.

Every step is a function of the state that a checkpoint holds. So a run that was killed and resumed ends with the same
weights as one that was not, bit for bit, on the same machine with the same number of threads (tested on CPUs).
"""

import math
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onelip.core.bake import bake
from onelip.core.errors import Diverged, RecipeError, RunError, Stopped
from onelip.core.files import file_hash, read_json, write_json
from onelip.data import Batch, DataNotFound, ImageData, load_data
from onelip.data.registry import absolute_source
from onelip.losses import OffsetCrossEntropy
from onelip.training.budget import describe_run, fit_to_budget, has_choice_of_threads, require_memory
from onelip.training.build import (
    build_model,
    check_same_images,
    find_imports,
    import_needed,
    load_weights,
    save_weights,
    split_data,
)
from onelip.training.checkpoint import Position, check_same_data, load_checkpoint, save_checkpoint
from onelip.training.display import Display
from onelip.training.distributed import Process, StopRequest, processes, stop_on_signals, use_threads
from onelip.training.evaluation import Constants, Effort, Evaluation, evaluate, find_constants
from onelip.training.learner import Learner, learning_rate, make_batches, with_measured_products
from onelip.training.loggers import LOGGERS, check_loggers
from onelip.training.recipe import Recipe
from onelip.training.run_directory import (
    RunConfig,
    RunDirectory,
    RunLog,
    open_run,
    read_config,
    record_session,
    remove_new,
    trim_log,
)
from onelip.training.teacher import copy_teacher, load_teacher


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    budget: float | None = None,
    chosen: Collection[str] | None = None,
    data: ImageData | None = None,
    data_root: str | Path | None = None,
    display: Display | None = None,
    log: Sequence[str] = (),
    save_minutes: float = 10.0,
    save_steps: int = 0,
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Train a network by a recipe.

    Signal handlers are not changed: Ctrl-C raises KeyboardInterrupt as usual, and the run can be resumed from its last
    checkpoint. Use `stop` to end a run in an orderly way; `onelip train` calls it on SIGINT and SIGTERM.

    Args:
        recipe: everything that decides the result.
        out: directory of the run; new, or with `resume` that of a run of this recipe.
        resume: continue from the last checkpoint, if there is one.
        budget: seconds of steps and evaluations. The number of epochs of the recipe is then chosen from the measured
            speed, before the run starts; see `onelip.training.recipe_for_budget`.
        chosen: names of fields of the recipe that a budget must not change; see `onelip.training.fit_to_budget`.
        data: the images; by default loaded by the recipe's name.
        data_root: directory of named data sets; a resumed run remembers it.
        display: shows the progress; None shows nothing.
        log: further logs besides log.jsonl: "csv", "tensorboard", "wandb", "trackio".
        save_minutes: besides after each epoch, write a checkpoint at this interval; 0 for never.
        save_steps: the same in steps.
        stop: call it, from any thread or signal handler, to save and stop after the current step.

    Returns:
        The content of results.json.

    Raises:
        Stopped: after a stop request; the run is saved.
        Diverged: when the loss or a weight is no longer finite; the last good checkpoint is kept.
        RecipeError: when the recipe is invalid, in itself or for these images.
        RunError: when the directory cannot be used.
    """
    for name, value in (("save_minutes", save_minutes), ("save_steps", save_steps)):
        if not value >= 0:  # true for NaN
            raise RecipeError(f"expected {name} of at least 0, got {value}")
    if budget is not None and (resume or not 0 < budget < math.inf):
        raise RecipeError(f"expected a positive budget, and a new run, got {budget!r}; a run to resume keeps its steps")
    check_loggers(log)
    recipe, run = _with_absolute_runs(recipe), RunDirectory(out)
    if resume:
        kept = read_config(run)
        import_needed(kept, run, is_trained=True)
        data_root = data_root or kept.data_root
        if recipe.products == "auto":
            recipe = recipe.replace(products=kept.recipe.products)
    elif recipe.start_from:
        start = RunDirectory(recipe.start_from)
        import_needed(read_config(start), start, is_trained=True)
    root = None if data_root is None else str(Path(data_root).expanduser().absolute())
    options = SessionOptions(resume, tuple(log), save_minutes, save_steps, root)
    with processes(recipe.device) as process:
        shown = display if display is not None and process.is_first else Display(None)
        if data is None:
            data = process.run_on_all(_load_data, recipe, data_root, run, resume)
            recipe = recipe.replace(data=absolute_source(recipe.data))
        if recipe.start_from and not resume:
            check_same_images("--start-from", read_config(RunDirectory(recipe.start_from)), recipe, data)
        gpu = [process.device] if process.device.type == "cuda" else []
        # fork_rng: the caller's random numbers are not changed.
        with ExitStack() as opened, torch.random.fork_rng(devices=gpu), use_threads(recipe.threads):
            # Before anything is measured or printed: a directory that is taken is an error at once.
            opening = open_run(run, recipe, resume=resume)
            kept = process.run_on_all(lambda: opened.enter_context(opening) if process.is_first else frozenset[str]())
            slower = 0  # number of threads
            if budget is not None:
                has_choice = has_choice_of_threads(recipe, process) and "threads" not in (chosen or ())
                choices = {1, torch.get_num_threads()} if has_choice else set()
                recipe = fit_to_budget(recipe, budget, data, process, chosen)
                opened.enter_context(use_threads(recipe.threads))
                slower = max(choices - {torch.get_num_threads()}, default=0)
            recipe = with_measured_products(recipe, process.device)
            memory = process.run_on_all(require_memory, recipe, data.num_classes, data.shape, process)
            if process.broadcast(shown.console is not None) and not resume:
                # By all processes: steps are timed, and layers may communicate.
                shown.block(process.run_on_all(describe_run, recipe, data, process, memory, budget, slower))
            trainer = None
            try:
                trainer = Trainer(recipe, run, data, process, shown, stop or StopRequest(), options)
                return trainer.run_to_end()
            except BaseException as error:
                is_new = not resume and process.is_first and (trainer is None or trainer.steps_done == 0)
                if is_new and not isinstance(error, Diverged):
                    remove_new(run, kept)
                if not isinstance(error, RuntimeError):
                    raise
                if not recipe.compile or not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                    raise
                what = str(error).strip().partition("\n")[0]
                raise RunError(f"torch.compile failed for this network ({what}); omit --compile") from error
            finally:
                shown.stop()


def train_or_reuse(recipe: Recipe, out: str | Path, *, handle_signals: bool = False, **settings: Any) -> dict[str, Any]:
    """The results of a run in a directory: of a finished one; else it is resumed; else a new one is trained.

    Args:
        recipe: everything that decides the result; a run in the directory must have the same recipe.
        out: directory of the run.
        handle_signals: on SIGINT and SIGTERM, save the run and raise `Stopped`.
        **settings: arguments of `train` besides `resume` and `stop`.

    Returns:
        The content of results.json.

    Raises:
        RecipeError: if the directory contains a run of another recipe.
        Exception: those of `train`.
    """
    recipe, run = _with_absolute_runs(recipe), RunDirectory(out)
    is_started = run.config.exists()
    if is_started and run.results.exists():  # the results are written last
        recipe.check_resumes(read_config(run).recipe)
        return read_json(run.results)
    with stop_on_signals(at_once=True) if handle_signals else nullcontext() as stop:
        return train(recipe, out, resume=is_started, stop=stop, **settings)


@dataclass(frozen=True)
class SessionOptions:
    """Options of `train` that do not change the result."""

    resume: bool = False
    log: tuple[str, ...] = ()
    save_minutes: float = 10.0
    save_steps: int = 0
    data_root: str | None = None


class Trainer:
    """One session of a run: start or resume, train epoch by epoch, evaluate, log, save, finish.

    Args:
        recipe: everything that decides the result.
        run: the directory, opened by the first process.
        data: training and test images.
        process: this process among several; only the first one evaluates and writes files.
        display: shows the progress.
        stop: request to stop after the current step.
        options: options that do not change the result.
    """

    def __init__(
        self,
        recipe: Recipe,
        run: RunDirectory,
        data: ImageData,
        process: Process,
        display: Display,
        stop: StopRequest,
        options: SessionOptions,
    ) -> None:
        self.recipe, self.run, self.data = recipe, run, data
        self.process, self.display, self.stop, self.options = process, display, stop, options
        self.used = split_data(recipe, data)
        self.generator = torch.Generator().manual_seed(recipe.seed)
        self.loader = make_batches(recipe, self.used, process, self.generator)
        self.steps = recipe.epochs * len(self.loader)
        torch.manual_seed(recipe.seed)
        self.model = process.run_on_all(build_model, recipe, data.num_classes, data.shape).to(process.device)
        if recipe.start_from and not (options.resume and run.checkpoint.exists()):
            process.run_on_all(load_weights, self.model, recipe.start_from)
        copy = run.teacher if options.resume else None
        teacher = process.run_on_all(load_teacher, recipe, data, process.device, copy)
        if recipe.teacher and not options.resume:
            process.run_on_all(lambda: process.is_first and copy_teacher(recipe, run))
        self.learner = Learner(recipe, self.model, process, teacher)
        process.run_on_all(self.learner.objective.check, data.shape)
        self.test_loss = OffsetCrossEntropy(recipe.offset, recipe.temperature)
        self.position = Position()
        self.epoch_state = self.generator.get_state()  # of the data generator, at the start of the epoch
        self.log: RunLog | None = None  # in the first process
        self.saved_at = self.clock = time.monotonic()

    def run_to_end(self) -> dict[str, Any]:
        """Train to the end of the recipe; returns the content of results.json."""
        if self.process.broadcast(self.options.resume and self.run.checkpoint.exists()):
            self.load()
        self.process.run_on_all(self.open_log)
        if self.position == Position():
            self.save()
            self.stop.raise_if_at_once()
        self.learner.wrap()
        self.display.start(self.recipe.epochs, self.steps, self.steps_done)
        while self.position.epoch < self.recipe.epochs:
            self.train_epoch()
            self.end_epoch()
        self.display.stop()
        return self.process.broadcast(self.process.run_on_all(self.finish))

    @property
    def steps_done(self) -> int:
        """Steps of the run that are done."""
        return self.position.epoch * len(self.loader) + self.position.batch

    def train_epoch(self) -> None:
        """The remaining steps of the current epoch."""
        self.model.train()
        self.epoch_state = self.generator.get_state()
        self.clock = time.monotonic()
        with self.stop.deferred():  # until the step is done and saved
            for batch in self.loader.epoch(skip=self.position.batch):
                self.train_step(batch)
                self.save_or_stop()
                self.clock = time.monotonic()
        if not all(bool(parameter.isfinite().all()) for parameter in self.model.parameters()):
            raise self.diverged(f"NaN or infinity in the weights after epoch {self.position.epoch + 1}")

    def train_step(self, batch: Batch) -> None:
        """One step, and its part of the statistics of the epoch."""
        step, at = self.steps_done, self.position
        try:
            loss = self.learner.step(
                batch.images,
                batch.labels,
                batch_size=batch.global_size,
                progress=step / self.steps,
                lr=learning_rate(self.recipe, step, self.steps),
            )
        except Diverged as error:
            raise self.diverged(f"{error} (step {step + 1}, epoch {at.epoch + 1})") from error
        value = float(self.process.sum_over_ranks(loss))
        if not math.isfinite(value):
            raise self.diverged(f"the loss is {value} in step {step + 1} (epoch {at.epoch + 1})")
        self.position = replace(
            at,
            batch=at.batch + 1,
            loss_sum=at.loss_sum + value * batch.global_size,
            images=at.images + batch.global_size,
            seconds=at.seconds + time.monotonic() - self.clock,
        )
        self.display.step(at.epoch + 1, step + 1, batch.global_size, value)

    def save_or_stop(self) -> None:
        """After a step: write a checkpoint if one is due, and stop if that was requested in any process."""
        options = self.options
        minutes = (time.monotonic() - self.saved_at) / 60
        is_due = (options.save_steps and self.steps_done % options.save_steps == 0) or (
            options.save_minutes and minutes > options.save_minutes
        )
        # The clocks of processes differ, but all of them save, or none.
        signal_number, is_due = self.process.max_over_ranks(self.stop.signal_number, int(is_due))
        if signal_number or is_due:
            self.save()
        if signal_number:
            raise Stopped(f"stopped and saved after step {self.steps_done} of {self.steps}", signal_number)

    def end_epoch(self) -> None:
        """Save, evaluate and log; then the next epoch is the current one."""
        # Saved before the evaluation, so that a kill during it costs no step: the resumed run repeats it, and
        # a line that was logged before is trimmed.
        self.save()
        self.stop.raise_if_at_once()
        done = self.position.epoch + 1
        is_due = done % self.recipe.evaluate_every == 0 or done == self.recipe.epochs
        if is_due and (line := self.process.run_on_all(self.log_epoch)):
            self.display.epoch(line)
        self.position = Position(epoch=self.position.epoch + 1)
        self.epoch_state = self.generator.get_state()
        if self.position.epoch == self.recipe.epochs:  # nothing is left to repeat
            self.save()
        self.display.pause(time.monotonic() - self.clock)

    # State: checkpoints and logs.

    def load(self) -> None:
        """Continue from the checkpoint."""
        path, optimizer = self.run.checkpoint, self.learner.optimizer
        self.position, states = self.process.run_on_all(
            load_checkpoint, path, self.model, optimizer, self.data.fingerprint, self.learner.average
        )
        self.generator.set_state(states["data"])
        torch.set_rng_state(states["torch"])
        if self.process.device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], self.process.device)
        self.display.print(f"resuming {self.run.path} after epoch {self.position.epoch}, step {self.position.batch}")

    def save(self) -> None:
        """Write a checkpoint, in the first process."""
        with self.stop.deferred():
            self.process.run_on_all(self.write_checkpoint)
        self.saved_at = time.monotonic()

    def write_checkpoint(self) -> None:
        """The part of `save` that can fail."""
        if not self.process.is_first:
            return
        states = {"data": self.epoch_state, "torch": torch.get_rng_state()}
        if self.process.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.process.device)
        path, optimizer = self.run.checkpoint, self.learner.optimizer
        try:
            average = self.learner.average
            save_checkpoint(path, self.model, optimizer, states, self.position, self.data.fingerprint, average)
        except Diverged as error:
            raise self.diverged(str(error)) from error

    def diverged(self, what: str) -> Diverged:
        """The error for a run whose numbers are not finite."""
        return Diverged(
            f"the run has diverged: {what}; {self.run.checkpoint} has the last good weights; try a lower --lr"
        )

    def open_log(self) -> None:
        """Write the config, record the session and open the log, in the first process."""
        if not self.process.is_first:
            return
        run, data = self.run, self.data
        if self.options.resume:  # also without a checkpoint
            check_same_data(run.config, read_config(run).fingerprint, data.fingerprint)
        config = RunConfig(
            recipe=self.recipe,
            data_name=data.name,
            fingerprint=data.fingerprint,
            class_names=data.class_names,
            shape=data.shape,
            data_root=self.options.data_root,
            imports=find_imports(self.recipe),
        )
        write_json(run.config, config.to_json())
        facts = {
            "torch": torch.__version__,
            "device": str(self.process.device),
            "threads": torch.get_num_threads(),
            "processes": self.process.count,
        }
        for name, before in record_session(run, **facts).items():
            self.display.print(
                f"note: {name} was {before} and is {facts[name]}; the weights will agree up to rounding only"
            )
        trim_log(run, self.position.epoch)
        self.log = RunLog(run, [LOGGERS[name](run, config.to_json()) for name in self.options.log])

    # Evaluation, in the first process.

    def log_epoch(self) -> dict[str, Any] | None:
        """Evaluate the current epoch and add its line to the log."""
        if self.log is None:
            return None
        plain = bake(self.learner.evaluated, expand=False)  # the faster form
        found = self.evaluate(plain, self.used, self.constants(plain))
        at, steps = self.position, (self.position.epoch + 1) * len(self.loader)
        line = {
            "epoch": at.epoch + 1,
            "step": steps,
            "train_loss": at.loss_sum / at.images,
            "lr": learning_rate(self.recipe, steps - 1, self.steps),
            "seconds": at.seconds,
            "images_per_second": at.images / at.seconds,
            "split": "validation" if self.recipe.validation else "test",
            "loss": found.loss,
            **asdict(found.total),
        }
        self.log.write(line)
        return line

    def finish(self) -> dict[str, Any] | None:
        """Write the final weights and the results."""
        if self.log is None:
            return None
        self.log.close()
        plain = bake(self.learner.evaluated)
        save_weights(self.run, self.learner.evaluated, plain)
        constants = self.constants(plain, effort="high")
        parts = ({"validation": self.used} if self.recipe.validation else {}) | {"test": self.data}
        results: dict[str, Any] = {}
        for name, part in parts.items():
            found = self.evaluate(plain, part, constants)
            results[name] = {
                "data": self.data.name,
                "split": name,
                "weights_sha256": file_hash(self.run.plain),
                **found.to_json(self.data.class_names),
            }
        write_json(self.run.results, results)
        return results

    def constants(self, plain: nn.Module, effort: Effort = "normal") -> Constants:
        """Lipschitz constants of the network."""
        return find_constants(self.learner.evaluated, plain, self.recipe, self.data.shape, effort)

    def evaluate(self, plain: nn.Module, part: ImageData, constants: Constants) -> Evaluation:
        """Evaluate the test images of a data set."""
        return evaluate(plain, part.test_images, part.test_labels, constants, loss=self.test_loss)


def _with_absolute_runs(recipe: Recipe) -> Recipe:
    """The recipe with absolute paths of the runs that it names."""
    paths = {name: getattr(recipe, name) for name in ("start_from", "teacher") if getattr(recipe, name)}
    return recipe.replace(**{name: str(Path(path).expanduser().absolute()) for name, path in paths.items()})


def _load_data(recipe: Recipe, root: str | Path | None, run: RunDirectory, resume: bool) -> ImageData:
    try:
        return load_data(recipe.data, root, image_size=recipe.resize_to)
    except DataNotFound as error:
        if not resume:
            raise
        raise DataNotFound(
            f"{error}; if the data were moved, resume with `{run.resume_command} --data PATH`"
        ) from error
