"""What the key `devices` says."""

from __future__ import annotations

import pytest
import torch

from juggler.learner.process import devices
from juggler.learner.process.devices import device_for, parse_devices, use_threads


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("auto", ["auto"]),
        ("cpu", ["cpu"]),
        ("cuda:0, cuda:1", ["cuda:0", "cuda:1"]),
        ("fake:3", ["fake:0", "fake:1", "fake:2"]),
        ("cuda:1,cpu,cuda:1", ["cuda:1", "cpu", "cuda:1"]),
    ],
)
def test_devices_are_named_one_after_the_other(text: str, names: list[str]) -> None:
    assert parse_devices(text) == names


@pytest.mark.parametrize("text", ["", "gpu", "cuda", "cuda:x", "fake:0", "cpu,", "tpu:1,cpu"])
def test_what_is_no_device_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"devices = .* is not a device; expected auto, cpu"):
        parse_devices(text)


def test_learners_take_turns_on_the_devices_of_their_host() -> None:
    here = ["cuda:0", "cuda:1"]
    assert [device_for("auto", index, here) for index in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert device_for("auto", 5, ["cpu"]) == "cpu"
    assert device_for("fake:3", 0, here) == "cpu"
    assert device_for("cuda:1", 0, here) == "cuda:1"


def test_a_device_that_a_host_has_not_got_is_named_with_those_it_has() -> None:
    with pytest.raises(ValueError, match="devices = 'cuda:2': this host has cuda:0 and cuda:1: na"):
        device_for("cuda:2", 0, ["cuda:0", "cuda:1"])


def test_a_gpu_that_a_host_has_not_got_is_told_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="'cuda:0'") as refused:
        device_for("cuda:0", 0, ["cpu"])
    assert str(refused.value) == (
        "devices = 'cuda:0': this host has cpu: name cpu, or leave devices out; for a GPU, install "
        "a PyTorch that finds it"
    )


def test_more_threads_than_cores_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "usable_cores", lambda: 2.5)
    before = torch.get_num_threads()
    try:
        assert use_threads(2) == ""
        assert torch.get_num_threads() == 2
        assert use_threads(3) == (
            "computes in 3 threads (learner_threads), and its host has 2.5 cores: the threads wait "
            "for each other, so updates take longer"
        )
    finally:
        torch.set_num_threads(before)
