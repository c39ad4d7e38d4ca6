"""Callbacks: a user's own code at the events of a run, for `txl_dist.pretrain(config, callbacks=[...])`.

    on_train_start -> (on_step_end | on_validation_end | on_save) ... -> on_train_end, or on_exception

A callback is any object with at least one of these methods. It may derive from `Callback`, but this is not necessary.

Every method runs on every rank, at the same step, except `state_dict`, which runs on rank 0. The arguments of a method
are read-only: values, and copies of arrays. Random generators and torch's global settings are restored after each call.
So a run with callbacks has the losses of a run without them, bit for bit.

If a method raises an error on one rank, the run ends on all ranks with one error. This error names the callback, the
rank and the step. Therefore the ranks exchange a small message on the host after each event that a callback handles.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from txl_dist.config.load import Config
from txl_dist.console.logging import logger
from txl_dist.console.suggest import did_you_mean
from txl_dist.distributed.collectives import gather_objects, get_rank, run_on_all_ranks
from txl_dist.errors import REQUEUE, ConfigError, TrainingError, in_one_line, raised_everywhere


class RunResult(NamedTuple):
    """Result of a call of `pretrain`. All fields are the same on every rank."""

    steps: int
    """Finished optimizer steps of the whole run, including the steps of earlier processes."""
    tokens_seen: int
    """Number of tokens that the run has trained on, over all ranks and steps."""
    loss: float | None
    """Training loss of the last step in nats per token, or None if this call made no step."""
    validation_loss: float | None
    """Loss of the last validation in nats per token, or None if there was no validation."""
    ended: Literal["done", "stopped"]
    """`done` means that `train.max_steps` steps are finished. `stopped` means that the run ended early after a stop
    request, and has saved its state."""
    reason: str
    """Reason why the run ended, as a text for people: "train.max_steps", or the source of the stop request, for
    instance "SIGTERM"."""
    checkpoint: Path | None
    """The newest checkpoint of the run."""
    run_dir: Path
    """Folder of the run."""

    @property
    def exit_code(self) -> int:
        """Exit code of `txl train`. It is 0 if the run is finished, and 75 if the run stopped early and the same
        command will continue it."""
        if self.ended == "done":
            return 0
        return REQUEUE


class TrainStart(NamedTuple):
    """Argument of the callback method `on_train_start`. All fields except `rank` and `device` are the same on every
    rank."""

    config: Config
    """All settings of the run, as a read-only object."""
    step: int
    """Number of finished steps: 0 for a new run, else the step of the checkpoint that the run resumes."""
    rank: int
    """Number of this rank, from 0."""
    world_size: int
    """Number of ranks in the run."""
    device: str
    """Device of this rank, for instance cuda:0 or cpu."""
    num_parameters: int
    """Number of trainable values of the model."""
    vocab_size: int

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.config.run.dir)


class StepEnd(NamedTuple):
    """Argument of the callback method `on_step_end`. All fields except `tokens_BT` are the same on every rank."""

    step: int
    """Number of this step, from 1."""
    loss: float
    """Mean loss of the global batch in nats per token. It can be infinite or NaN if the step was skipped."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    """Learning rate of the step."""
    skipped: bool
    """Whether the step changed no weight, because its loss or gradient was not finite."""
    tokens_seen: int
    """Number of tokens that the run has trained on so far, over all ranks."""
    tokens_BT: npt.NDArray[np.int64]
    """Input ids of this rank's lanes, [lanes of the rank, segment_len]. The array is a read-only copy."""


class ValidationEnd(NamedTuple):
    """Argument of the callback method `on_validation_end`. All fields are the same on every rank."""

    step: int
    """Number of finished steps at this validation."""
    loss: float
    """Loss of the first corpus's validation split in nats per token. Without such a split it is the loss of the first
    held-out set."""
    losses: Mapping[str, float]
    """Validation losses in nats per token. The key is the name of the loss's record in metrics.jsonl: `eval` for the
    first corpus, and `eval_NAME` for a further corpus or a held-out set NAME."""
    is_best: bool
    """Whether `loss` is the lowest of the run so far."""


class SaveEnd(NamedTuple):
    """Argument of the callback method `on_save`. All fields are the same on every rank."""

    step: int
    """Step whose state the checkpoint stores. Training may already be some steps further."""
    path: Path
    """Folder of the checkpoint."""


class Callback:
    """Base class for callbacks. Each of its methods does nothing, so define only the methods that you need.

    All methods run on all ranks, except `state_dict`. Deriving from this class is optional. The class gives an editor
    the names and types of the methods. A class that derives from it may define `state_dict` without `load_state_dict`.

    If only one process should do something, such as writing a file, do it only where `TrainStart.rank` is 0.
    """

    @property
    def state_key(self) -> str:
        """Name under which a checkpoint stores the callback's state. Error messages contain it too.

        If several callbacks have a state, their names must differ.
        """
        return type(self).__qualname__

    def on_train_start(self, start: TrainStart) -> None:
        """Called on all ranks before the first step of this process, after the checkpoint and the callbacks' states are
        loaded."""

    def on_step_end(self, end: StepEnd) -> None:
        """Called on all ranks after each optimizer step, before the checkpoint of that step is taken."""

    def on_validation_end(self, end: ValidationEnd) -> None:
        """Called on all ranks after each validation, including the validation after the last step."""

    def on_save(self, end: SaveEnd) -> None:
        """Called on all ranks after a checkpoint is complete on disk."""

    def on_train_end(self, result: RunResult) -> None:
        """Called on all ranks after the last step or after a stop request, when the state has been saved."""

    def on_exception(self, error: BaseException) -> None:
        """Called on every rank that still runs when an error ends the run. The error can come from this callback.

        An exception that this method raises is logged. Ranks end without waiting for each other, so the method must be
        short and must not use collectives.
        """

    def state_dict(self) -> Mapping[str, Any]:
        """Called on rank 0 for each checkpoint. Return the values that the checkpoint stores for this callback.

        Values are JSON (None, bool, int, float, str, lists and dictionaries with text keys) or, at the top level,
        tensors. The call follows `on_step_end` of the saved step.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Called on all ranks when a run resumes, and when a run returns to an earlier checkpoint after a loss spike.
        Restore the values that `state_dict` returned.

        Tensors are on the CPU. The method is not called for a checkpoint without a state of this callback.
        """


HOOKS = ("on_train_start", "on_step_end", "on_validation_end", "on_save", "on_train_end")
"""Callback methods that all ranks call together."""
EVENTS = (*HOOKS, "on_exception")
"""All callback methods that are called at an event of the run."""
FOREIGN = {
    "on_train_begin": "on_train_start",
    "on_fit_start": "on_train_start",
    "on_fit_end": "on_train_end",
    "on_train_batch_end": "on_step_end",
    "on_batch_end": "on_step_end",
    "on_evaluate": "on_validation_end",
    "on_eval_end": "on_validation_end",
    "on_save_checkpoint": "on_save",
    "on_load_checkpoint": "load_state_dict",
    "on_error": "on_exception",
}
"""Method names of Lightning, transformers and Keras, each with the corresponding name of this package. Error messages
suggest the name of this package."""
States = dict[str, Mapping[str, Any]]
"""Results of the callbacks' `state_dict`, each under the `state_key` of its callback."""


class Callbacks:
    """The callbacks of a run on one rank, with one method for each event of the run. The training loop calls these
    methods on all ranks together, except `fail`."""

    def __init__(self, callbacks: Iterable[object]) -> None:
        """Store the callbacks after checking each of them.

        Raises ConfigError for an object that is not a callback, or for two callbacks with the same `state_key`.
        """
        if not isinstance(callbacks, Iterable):
            raise ConfigError(
                f"callbacks: {_shown(callbacks)} is not a list. Write callbacks=[...], also for one callback."
            )
        self._callbacks = tuple(callbacks)
        for callback in self._callbacks:
            _check_callback(callback)
        names = self.stateful
        for name in names:
            if not isinstance(name, str) or "/" in name or not name:
                raise ConfigError(f"callbacks: the state_key {name!r:.200} must be a name without a slash.")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                f"callbacks: two callbacks have the state_key {twice[0]!r}. Give one of the two another state_key."
            )
        self._has_started = False
        self.validated_step = -1
        """Step of the last validation that was passed to the callbacks. It is -1 before the first validation."""

    @property
    def stateful(self) -> list[str]:
        """The `state_key` of each callback that has a state."""
        return [_name(callback) for callback in self._callbacks if _has(callback, "state_dict")]

    def check_alike(self) -> None:
        """Raise ConfigError if ranks have different callbacks, because such ranks would wait for each other forever."""
        forms = []
        for callback in self._callbacks:
            forms.append((type(callback).__qualname__, *(hook for hook in HOOKS if _has(callback, hook))))
        gathered = gather_objects(forms)
        for rank, others in enumerate(gathered):
            if others != gathered[0]:
                here = [form[0] for form in gathered[0]]
                there = [form[0] for form in others]
                raise raised_everywhere(
                    ConfigError(
                        f"callbacks differ between ranks: rank 0 has {here}, but rank {rank} has {there}. Pass the "
                        "same callbacks on every rank."
                    )
                )

    def handles(self, hook: str) -> bool:
        """Return whether any callback has this method."""
        return any(_has(callback, hook) for callback in self._callbacks)

    def start(self, start: TrainStart) -> None:
        """Call `on_train_start` of all callbacks, once per process."""
        if not self._has_started:
            self._has_started = True
            self._call("on_train_start", start, step=start.step)

    def end_step(self, end: StepEnd) -> None:
        """Call `on_step_end` of all callbacks."""
        self._call("on_step_end", end, step=end.step)

    def end_validation(self, end: ValidationEnd) -> None:
        """Call `on_validation_end` of all callbacks."""
        self.validated_step = end.step
        self._call("on_validation_end", end, step=end.step)

    def end_save(self, end: SaveEnd) -> None:
        """Call `on_save` of all callbacks."""
        self._call("on_save", end, step=end.step)

    def end(self, result: RunResult) -> None:
        """Call `on_train_end` of all callbacks."""
        self._call("on_train_end", result, step=result.steps)

    def fail(self, error: BaseException) -> None:
        """Call `on_exception` of all callbacks. Exceptions that `on_exception` raises are logged."""
        for callback in self._callbacks:
            if not _has(callback, "on_exception"):
                continue
            try:
                _method(callback, "on_exception")(error)
            except (Exception, SystemExit) as problem:  # noqa: BLE001  the run's own error is the one to report
                logger.error("callback %s: on_exception failed: %s", _name(callback), _described(problem))

    def states(self, *, step: int) -> States:
        """Return the states of all callbacks on rank 0, and an empty dictionary on other ranks.

        Raises TrainingError, which names the callback, if a `state_dict` fails.
        """
        if not self.stateful:
            return {}
        return run_on_all_ranks(lambda: self._states(step) if get_rank() == 0 else {})

    def load(self, states: States, *, step: int, validated_step: int) -> None:
        """Restore the saved state of each callback by its method `load_state_dict`, on all ranks.

        `validated_step` is the step of the last validation before the checkpoint. Rank 0 logs each callback that lacks
        a saved state, and each saved state that has no callback.
        """
        self.validated_step = validated_step
        known = {_name(callback): callback for callback in self._callbacks if _has(callback, "state_dict")}
        if get_rank() == 0:
            for name in sorted(known.keys() - states.keys()):
                logger.warning(
                    "callback %s: the checkpoint of step %d has no state of this callback. The callback starts "
                    "without a saved state",
                    name,
                    step,
                )
            for name in sorted(states.keys() - known.keys()):
                logger.warning(
                    "callback %s: the checkpoint of step %d has a state of this callback, but the run does not "
                    "use the callback. The saved state is dropped",
                    name,
                    step,
                )

        def load_all() -> None:
            for name in sorted(known.keys() & states.keys()):
                with _guarded(known[name], "load_state_dict", step=step):
                    _method(known[name], "load_state_dict")(states[name])

        if known:
            run_on_all_ranks(load_all)

    def _states(self, step: int) -> States:
        """Return the states of the callbacks of this rank."""
        states: States = {}
        for callback in self._callbacks:
            if _has(callback, "state_dict"):
                with _guarded(callback, "state_dict", step=step):
                    states[_name(callback)] = _method(callback, "state_dict")()
        return states

    def _call(self, hook: str, value: object, *, step: int) -> None:
        """Call a method of all callbacks that have it. Raises TrainingError on all ranks if a callback fails."""
        called = [callback for callback in self._callbacks if _has(callback, hook)]

        def call_all() -> None:
            for callback in called:
                with _guarded(callback, hook, step=step):
                    _method(callback, hook)(value)

        if called:
            run_on_all_ranks(call_all)


def _check_callback(callback: object) -> None:
    """Raise ConfigError for an object that has no callback method, or that has a method `on_...` which is never
    called."""
    if isinstance(callback, type):
        raise ConfigError(f"callbacks: {_shown(callback)} is a class. Pass an instance of it: {callback.__name__}().")
    for name in dir(callback):
        if name.startswith("on_") and name not in EVENTS and callable(getattr(callback, name, None)):
            meant = FOREIGN.get(name)
            if meant:
                hint = f" Did you mean {meant}?"
            else:
                hint = did_you_mean(name, EVENTS)
            raise ConfigError(
                f"callbacks: {_name(callback)} has a method {name}, which is never called.{hint} The methods that "
                f"a run calls at its events are {', '.join(EVENTS)}."
            )
    if not isinstance(callback, Callback) and not any(_has(callback, event) for event in EVENTS):
        raise ConfigError(
            f"callbacks: {_shown(callback)} has none of the methods of a callback: {', '.join(EVENTS)}. Define at "
            "least one of these methods."
        )
    for method, other in (("state_dict", "load_state_dict"), ("load_state_dict", "state_dict")):
        if _has(callback, method) and not callable(getattr(callback, other, None)):
            raise ConfigError(
                f"callbacks: {_name(callback)} has {method} but no {other}. A callback with a state needs both methods."
            )


def _shown(thing: object) -> str:
    """Return the representation of an object in one line of at most 200 characters."""
    return " ".join(repr(thing).split())[:200]


def _has(callback: object, method: str) -> bool:
    """Return whether a callback defines a method itself. The methods that it inherits from `Callback` do nothing and do
    not count."""
    function = getattr(callback, method, None)
    return callable(function) and getattr(function, "__func__", None) is not getattr(Callback, method)


def _method(callback: object, name: str) -> Callable[..., Any]:
    """Return a callback's method by its name. The callback must have this method."""
    method: Callable[..., Any] = getattr(callback, name)
    return method


def _name(callback: object) -> str:
    """Return a callback's name. A checkpoint stores the callback's state under this name, and error messages contain
    it."""
    name: str = getattr(callback, "state_key", type(callback).__qualname__)
    return name


@contextmanager
def _guarded(callback: object, method: str, *, step: int) -> Iterator[None]:
    """Return a context manager that turns an error of a callback into a TrainingError that names the callback.

    Changes that the callback makes to global state are undone.
    """
    try:
        with _untouched():
            yield
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise TrainingError(
            f"callback {_name(callback)}: {method} failed on rank {get_rank()} at step {step}: "
            f"{_described(error)}. Correct the callback. The same command then continues from the last checkpoint."
        ) from error


@contextmanager
def _untouched() -> Iterator[None]:
    """Return a context manager that restores random generators and torch's global settings after its block."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()
    if torch.cuda.is_initialized():
        gpu_state = torch.cuda.get_rng_state()
    else:
        gpu_state = None
    dtype = torch.get_default_dtype()
    num_threads = torch.get_num_threads()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    is_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with torch.enable_grad():  # leaving it puts the mode before it back
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if gpu_state is not None:
            torch.cuda.set_rng_state(gpu_state)
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        if torch.are_deterministic_algorithms_enabled() != is_deterministic:
            torch.use_deterministic_algorithms(is_deterministic, warn_only=is_warning)


def _described(error: BaseException) -> str:
    """Return a description of an error in one line, with the file and line that raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        where = f" ({frames[-1].filename}:{frames[-1].lineno})"
    else:
        where = ""
    return in_one_line(error) + where
