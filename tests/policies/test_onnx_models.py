from __future__ import annotations

import faulthandler
import re
import sys
import traceback
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from support import worlds

import juggler
from juggler.runtime.acting.acting_graph import _EXPORTING
from juggler.runtime.actors.attachment import Detached
from juggler.runtime.actors.worker import _LeavingInbox
from juggler.runtime.install_commands import installing


def model_of(path: Path, **arguments: Any) -> onnxruntime.InferenceSession:
    policy = juggler.load_policy(path, **arguments)
    return onnxruntime.InferenceSession(policy.export_onnx(path.parent / "policy.onnx"))


def test_a_model_takes_batches_of_any_size_and_names_what_it_takes(tmp_path: Path) -> None:
    path = worlds.written(
        tmp_path, worlds.motors, connectors={"env_to_module": [{"use": "frame_stack", "k": 2}]}
    )
    model, policy = model_of(path), juggler.load_policy(path)
    assert {each.name for each in model.get_inputs()} == {
        "observation",
        "first",
        "state/connectors/frame_stack",
    }
    assert {each.name for each in model.get_outputs()} == {
        "action",
        "next_state/connectors/frame_stack",
    }
    for rows in (1, 2, 7):
        seen = np.random.default_rng(rows).normal(size=(rows, 4)).astype(np.float32)
        given = {
            "observation": seen,
            "first": np.ones(rows, np.bool_),
            "state/connectors/frame_stack": np.zeros((rows, 1, 4), np.float32),
        }
        (action,) = model.run(["action"], given)
        np.testing.assert_allclose(action, policy.act(seen)[0], rtol=1e-5, atol=1e-5)


def test_the_mean_of_probable_returns_chooses_in_a_model_too(tmp_path: Path) -> None:
    model = {"atoms": 11, "v_min": -1.0, "v_max": 1.0, "dueling": True}
    path = worlds.written(tmp_path, "CartPole-v1", algorithm="dqn", model=model)
    seen = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    (action,) = model_of(path).run(["action"], {"observation": seen})
    assert set(action.tolist()) == {0, 1}
    np.testing.assert_array_equal(action, juggler.load_policy(path).act(seen)[0])


def test_a_connector_in_numpy_alone_is_named(tmp_path: Path) -> None:
    connectors = {"env_to_module": ["support.worlds:Sorted"]}
    policy = juggler.load_policy(worlds.written(tmp_path, worlds.plain, connectors=connectors))
    with pytest.raises(ValueError, match="takes_tensors"):
        policy.export_onnx(tmp_path / "policy.onnx")
    assert not (tmp_path / "policy.onnx").exists()


class InNumPy(juggler.ActorCritic):
    """What torch cannot look into."""

    def _forward(self, batch):
        seen = batch["observations"]
        return super()._forward({"observations": torch.from_numpy(np.sort(seen.numpy()))})


def test_a_module_that_cannot_be_exported_is_named(tmp_path: Path) -> None:
    path = worlds.written(tmp_path, worlds.plain, InNumPy, module="__main__:InNumPy")
    policy = juggler.load_policy(path, module=InNumPy)
    policy.act(np.zeros(4))
    with pytest.raises(ValueError, match="InNumPy"):
        policy.export_onnx(tmp_path / "policy.onnx")
    policy.act(np.zeros(4))


class Heavy(juggler.ActionDistribution):
    """A user's distribution around one of torch, with checked arguments."""

    def __init__(self, inputs):
        location, log_scale = inputs.chunk(2, -1)
        self.each = torch.distributions.Laplace(location, log_scale.exp())

    def log_prob(self, actions):
        return self.each.log_prob(actions).sum(-1)

    def entropy(self):
        return self.each.entropy().sum(-1)

    def kl(self, other):
        return torch.distributions.kl_divergence(self.each, other.each).sum(-1)

    def mode(self):
        return self.each.mode

    def sample(self, noise):
        return self.each.icdf(noise)


class HeavySpec(juggler.DistributionSpec):
    def __call__(self, inputs):
        return Heavy(inputs)


class HeavyTailed(juggler.ActorCritic):
    def action_distribution(self):
        size = self.action_space.shape[0]
        return HeavySpec(inputs_size=2 * size, noise_size=size)


def test_a_distribution_around_one_of_torch_can_be_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other packages may have turned it off, as Stable-Baselines3 does.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    path = worlds.written(tmp_path, "Pendulum-v1", HeavyTailed, module="__main__:HeavyTailed")
    seen = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    (action,) = model_of(path, module=HeavyTailed).run(["action"], {"observation": seen})
    expected = juggler.load_policy(path, module=HeavyTailed).act(seen)[0]
    np.testing.assert_allclose(action, expected, rtol=1e-5, atol=1e-5)
    with _EXPORTING, pytest.raises(ValueError, match="scale"):  # no other thread exports meanwhile
        torch.distributions.Laplace(0.0, -1.0)  # checks as before


class Branching(juggler.ActorCritic):
    def _forward(self, batch):
        seen = batch["observations"]
        return super()._forward({"observations": 2 * seen if seen.sum() > 0 else seen})


def test_a_module_that_branches_on_values_is_told_where_and_what_to_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = worlds.written(tmp_path, worlds.plain, Branching, module="__main__:Branching")
    policy = juggler.load_policy(path, module=Branching)
    place = r"torch\.where \(test_onnx_models\.py, line \d+, in _forward\)"
    with pytest.raises(ValueError, match=f"Branching cannot be exported: .*{place}") as failed:
        policy.export_onnx(tmp_path / "policy.onnx")
    assert capfd.readouterr() == ("", ""), "no graphs of torch"
    assert "".join(traceback.format_exception(failed.value)).count("Traceback") == 2


def test_a_worker_can_be_told_to_leave_while_it_exports(tmp_path: Path) -> None:
    inbox, exporting = _LeavingInbox(watched=True), []

    class Told(juggler.ActorCritic):
        """Another thread tells the worker so whenever a step is taken."""

        def _forward(self, batch):
            exporting.append(torch.compiler.is_exporting())
            other = Thread(target=inbox.put, args=(Detached("terminated"),))
            other.start()
            other.join()
            faulthandler.cancel_dump_traceback_later()  # else this process ends
            return super()._forward(batch)

    path = worlds.written(tmp_path, worlds.plain, Told, module="__main__:Told")
    juggler.load_policy(path, module=Told).export_onnx(tmp_path / "policy.onnx")
    assert any(exporting)
    assert len(inbox.gather()) == len(exporting)


def test_a_missing_package_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = juggler.load_policy(worlds.written(tmp_path, worlds.plain))
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ValueError, match=re.escape(f"onnxscript: {installing('onnx')}")):
        policy.export_onnx(tmp_path / "policy.onnx")
