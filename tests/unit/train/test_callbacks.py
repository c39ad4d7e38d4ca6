"""Allowed lists of callbacks, and allowed states of a callback."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import txl_dist
from txl_dist.errors import CheckpointError, ConfigError, TrainingError
from txl_dist.train.callbacks import HOOKS, Callback, Callbacks, StepEnd
from txl_dist.train.checkpoint.callback_states import (
    MAX_TENSOR_BYTES,
    NO_STATES,
    CallbackStates,
    packed_states,
    read_states,
)


class Counter(Callback):
    def state_dict(self) -> Mapping[str, Any]:
        return {"n": 1}


class Named(Counter):
    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def state_key(self) -> str:
        return self._name


class Misspelt(Callback):
    def on_step_ends(self, end: StepEnd) -> None: ...


class Plain:
    """Derives from nothing, and has two of the methods, a flag and a helper."""

    on_gpu, steps = True, 0

    def on_step_end(self, end: StepEnd) -> None:
        self.steps = end.step

    def _on_own_event(self) -> None: ...

    def state_dict(self) -> Mapping[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


def test_an_object_with_some_of_the_methods_is_a_callback_without_inheriting() -> None:
    errors: list[BaseException] = []
    callbacks = Callbacks([Plain(), SimpleNamespace(on_exception=errors.append)])
    assert [hook for hook in HOOKS if callbacks.handles(hook)] == ["on_step_end"]
    assert callbacks.stateful == ["Plain"]
    callbacks.fail(ValueError("a"))
    assert [str(error) for error in errors] == ["a"]


def test_the_names_are_those_of_lightning() -> None:
    assert {*HOOKS, "on_exception", "state_dict", "load_state_dict"} <= set(vars(Callback))
    assert txl_dist.Callback is Callback


@pytest.mark.parametrize(
    ("callbacks", "reason"),
    [
        ([Counter(), Counter()], "two callbacks have the state_key 'Counter'"),
        ([Named("a/b")], "must be a name without a slash"),
        ([Named("")], "must be a name without a slash"),
        ([Counter], r"is a class\. Pass an instance of it: Counter\(\)"),
        ([print], "has none of the methods of a callback: on_train_start, "),
        ([None], "None has none of the methods of a callback"),
        ([torch.nn.Linear(1, 1)], "has none of the methods of a callback"),
        ([SimpleNamespace(on_save=None)], "has none of the methods of a callback"),
        ([SimpleNamespace(on_step_end=print, on_saves=print)], r"on_saves, which is never .* Did you mean on_save\?"),
        ([Misspelt()], r"Misspelt has a method on_step_ends, which is never called\. Did you mean on_step_end\?"),
        ([SimpleNamespace(on_train_batch_end=print)], r"Did you mean on_step_end\?"),
        ([SimpleNamespace(on_save_checkpoint=print)], r"Did you mean on_save\?"),
        (
            [SimpleNamespace(on_zzzzzzzz=print)],
            "never called. The methods that a run calls at its events are on_train_start, ",
        ),
        ([SimpleNamespace(on_save=print, state_dict=dict)], "has state_dict but no load_state_dict"),
        ([SimpleNamespace(on_save=print, load_state_dict=print)], "has load_state_dict but no state_dict"),
        (
            [SimpleNamespace(on_save=print, state_dict=dict, load_state_dict=print, state_key=3)],
            "state_key 3 must be a name",
        ),
        (Counter(), r"Counter object at \w+> is not a list\. Write callbacks=\[\.\.\.\]"),
        (None, "None is not a list"),
    ],
)
def test_a_list_that_cannot_be_is_refused_in_one_line(callbacks: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        Callbacks(callbacks)
    assert "\n" not in str(refused.value)


def test_callbacks_without_a_state_may_be_of_one_class() -> None:
    assert Callbacks([Callback(), Callback(), Named("a"), Named("b")]).stateful == ["a", "b"]


@pytest.mark.parametrize("config", [3, None, ["a"], [("run", {})]])
def test_what_is_no_configuration_is_refused_in_one_line(config: Any) -> None:
    with pytest.raises(ConfigError, match="is not a configuration"):
        txl_dist.pretrain(config)


def test_an_unknown_setting_is_refused_before_any_rank_is_joined(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown setting train\.num_lane"):
        txl_dist.pretrain({"run": {"dir": str(tmp_path / "run")}, "train": {"num_lane": 3}})
    assert not (tmp_path / "run").exists()


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {
        "n": 3,
        "best": float("inf"),
        "text": "\u4e2d\n",
        "none": None,
        "on": True,
        "nested": {"a": [1, 2.5, {"b": []}]},
        "half": torch.ones(2, 3, dtype=torch.bfloat16),
        "mask": torch.tensor([True, False]),
        "scalar": torch.tensor(2.0, dtype=torch.float64),
        "empty": torch.zeros(0),
        "turned": torch.arange(6).view(2, 3).t(),
    }
    packed = packed_states(CallbackStates({"A": state, "B": {}}, validated_step=7))
    assert packed is not None
    save_file(*packed[:1], tmp_path / "callbacks.safetensors", metadata=packed[1])
    found = read_states(tmp_path)
    assert found.validated_step == 7
    assert found.states["B"] == {}
    assert found.states["A"].keys() == state.keys()
    for key, value in state.items():
        same = torch.equal(found.states["A"][key], value) if isinstance(value, torch.Tensor) else None
        assert same if same is not None else found.states["A"][key] == value


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({1, 2}, r"store the set that state_dict\(\) returned at seen\."),
        (np.float32(1), r"store the float32 that state_dict\(\) returned at seen\."),
        (np.zeros(3), r"store the ndarray that state_dict\(\) returned at seen\."),
        (
            {"a": torch.zeros(1)},
            r"store the Tensor that state_dict\(\) returned at seen\.a\. Put tensors at the top level",
        ),
        ({1: 2}, "use text as keys|Use text as keys"),
        ([[print]], r"store the builtin.* returned at seen\[0\]\[0\]\."),
        (b"bytes", r"store the bytes that state_dict\(\) returned at seen\."),
        (torch.zeros(1).expand(MAX_TENSOR_BYTES), "a checkpoint stores .* at most"),
        ("x" * (17 << 20), "a checkpoint stores .* at most"),
    ],
)
def test_a_value_that_would_not_come_back_is_refused_by_its_place(value: Any, reason: str) -> None:
    if isinstance(value, torch.Tensor):
        value = torch.empty(MAX_TENSOR_BYTES // 4 + 1)
    with pytest.raises(TrainingError, match=reason):
        packed_states(CallbackStates({"A": {"seen": value}}))


def test_a_state_that_is_no_dictionary_is_refused() -> None:
    with pytest.raises(
        TrainingError, match=r"callback A: a checkpoint cannot store the list that state_dict\(\) returned\."
    ):
        packed_states(CallbackStates({"A": [1]}))  # type: ignore[dict-item]


def test_a_checkpoint_without_the_file_has_no_states(tmp_path: Path) -> None:
    assert read_states(tmp_path) == NO_STATES
    assert packed_states(NO_STATES) is None


@pytest.mark.parametrize("content", [b"", b"not tensors", b"\xff" * 100])
def test_a_damaged_file_of_states_is_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "callbacks.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_states(tmp_path)
