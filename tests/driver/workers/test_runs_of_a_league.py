"""What a driver does with the commands of a league, whatever its workers say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import any_pb2
from support.league_run_world import Asked, Changing, World

from juggler.driver.checkpoint.beginning import Beginning, Source, keep, kept
from juggler.driver.checkpoint.frozen_modules import FrozenModule
from juggler.driver.checkpoint.snapshots import state_reader
from juggler.driver.config import RunConfig
from juggler.driver.league.events import AddPlayer, FreezePlayer, ResetPlayer, RetirePlayer
from juggler.driver.record import checkpoints
from juggler.runtime.checkpoints.checkpoint import CheckpointError
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.v1 import training_pb2


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    Asked.wanted.clear()
    Asked.fails = False
    yield World(tmp_path)
    Asked.fails = False


def test_a_copy_plays_once_every_envrunner_has_it(world: World) -> None:
    world.want(FreezePlayer("main-0"))
    (asked,) = world.copies_asked_for()
    assert not world.plays("main-0-v0")
    world.send_weights(asked)
    assert not world.plays("main-0-v0"), "the EnvRunner does not have it yet"
    world.take_parts()
    assert world.plays("main-0-v0")
    assert "main-0-v0" in world.parts.registry.frozen


def test_a_copy_that_is_retired_before_it_is_made_is_forgotten(world: World) -> None:
    world.want(FreezePlayer("main-0"))
    (asked,) = world.copies_asked_for()
    world.want(RetirePlayer("main-0-v0"))
    world.send_weights(asked)
    assert world.parts.registry.frozen == {}
    assert not world.asked(world.runner, training_pb2.AddPlayer)
    assert not world.asked(world.runner, training_pb2.RemovePlayer)


def test_a_learner_that_cannot_make_a_copy_is_asked_again_and_then_let_go(world: World) -> None:
    world.want(FreezePlayer("main-0"))
    (first,) = world.copies_asked_for()
    world.fail(world.learner, first)
    _, second = world.copies_asked_for()
    world.fail(world.learner, second)
    assert world.why_dismissed(world.learner) == "failed again: cannot"


def test_a_copy_waits_for_the_next_learner_if_its_learner_dies(world: World) -> None:
    world.want(FreezePlayer("main-0"))
    world.leave(world.learner)
    assert not world.plays("main-0")
    world.learner = world.join("learner")
    world.get_ready(world.learner)
    world.meet()
    (asked,) = world.copies_asked_for()
    world.send_weights(asked)
    world.take_parts()
    assert world.plays("main-0")
    assert world.plays("main-0-v0")


def test_an_envrunner_that_dies_with_a_copy_on_its_way_is_not_waited_for(world: World) -> None:
    other = world.join("envrunner", 1)
    world.want(FreezePlayer("main-0"))
    (asked,) = world.copies_asked_for()
    world.send_weights(asked)
    world.take_parts()
    assert not world.plays("main-0-v0")
    world.leave(other)
    assert world.plays("main-0-v0")


def test_a_copy_that_the_disk_refuses_is_told_and_the_league_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(path: Path, *_: Any, **__: Any) -> None:
        raise CheckpointError(path, "No space left on device")

    monkeypatch.setattr("juggler.driver.checkpoint.frozen_modules.write", refuses)
    world.want(FreezePlayer("main-0"))
    (asked,) = world.copies_asked_for()
    world.send_weights(asked)
    told = [text for text in world.told.messages if "there is no copy main-0-v0" in text]
    assert len(told) == 1
    assert "No space left on device" in told[0]
    assert not world.why_dismissed(world.learner), "it did nothing wrong"
    monkeypatch.setattr("juggler.driver.checkpoint.frozen_modules.write", checkpoints.write)
    world.want(FreezePlayer("main-0"))
    world.send_weights(world.copies_asked_for()[-1])
    world.take_parts()
    assert world.plays("main-0-v1")


def test_a_builder_that_fails_at_a_match_is_told(world: World) -> None:
    Asked.fails = True
    assert world.league.line_ups(world.join("envrunner", 1), 1), "somebody plays nevertheless"
    (told,) = [text for text in world.told.messages if "Asked.match failed" in text]
    assert "KeyError" in told


@pytest.mark.parametrize("half", [True, False])
def test_what_is_not_the_weights_of_the_player_is_blamed_on_the_learner(
    world: World, half: bool
) -> None:
    world.want(FreezePlayer("main-0"))
    (asked,) = world.copies_asked_for()
    header = training_pb2.StateHeader(module_id="main-0", extra="{}")
    chunks = list(encode_frame(header, {"other": np.ones(3)}, digest=True, chunk_bytes=10_000))
    sent = chunks[0][:20] if half else b"".join(chunks)
    world.reply(world.learner, asked, any_pb2.Any(value=sent))
    assert "cannot be understood" in world.why_dismissed(world.learner)
    assert any("there is no copy main-0-v0" in text for text in world.told.messages)
    assert not world.plays("main-0-v0")


@pytest.mark.parametrize(
    ("matches", "words"),
    [(3_000, ""), (70_000, "sent what cannot be understood: a message of over 66560 entries")],
)
def test_a_receipt_tells_of_as_many_matches_as_an_envrunner_with_many_environments_plays(
    world: World, matches: int, words: str
) -> None:
    told = [training_pb2.MatchResult(match_id=each, returns=[1, -1]) for each in range(matches)]
    returns, lengths = [0.0] * matches, [1] * matches
    world.sample(env_returns=returns, env_lengths=lengths, matches=told, module_id="main-0")
    assert world.why_dismissed(world.runner) == words
    assert world.parts.metrics.episodes == (0 if words else matches)


@pytest.mark.parametrize("module_id", ["main-0", "main-0-v0", "main-0-v1", "main-0-v2"])
def test_agents_are_played_by_players_that_there_are_or_were_and_by_no_others(
    world: World, module_id: str
) -> None:
    for _ in range(2):
        world.want(FreezePlayer("main-0"))
        world.send_weights(world.copies_asked_for()[-1])
        world.take_parts()
    world.want(RetirePlayer("main-0-v0"))
    told = training_pb2.AgentReturns(agent="row", module_id=module_id, returns=[1.0])
    ended = {"env_returns": [0.0], "env_lengths": [1], "agent_returns": [told]}
    world.sample(module_id="main-0", **ended)
    refused = "returns of 'main-0-v2', which is no module of this run"
    assert (refused in world.why_dismissed(world.runner)) == (module_id == "main-0-v2")
    assert world.parts.metrics.episodes == (0 if module_id == "main-0-v2" else 1)


def beginning(*whole: str) -> Beginning:
    """Weights of another run for the main."""
    weights = {"main-0": {"scale": np.full(3, 7.0, np.float32)}}
    sources = {"main-0": Source("those of another run", selectable=True)}
    return Beginning(weights, whole, {}, "those of another run", (), sources)


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("whole", [(), ("main-0",)])
def test_a_reset_gives_a_player_what_the_run_began_with(
    tmp_path: Path, resumes: bool, whole: tuple[str, ...]
) -> None:
    Asked.wanted.clear()
    began = Changing(tmp_path, beginning=beginning(*whole))
    saved = began.checkpoint() if resumes else None
    config = RunConfig.from_flat({"from_checkpoint": "runs/other"})
    keep(beginning(*whole), config, tmp_path)
    found = kept(config, tmp_path)
    assert found is not None
    np.testing.assert_array_equal(found.weights["main-0"]["scale"], np.full(3, 7.0))
    world = World(tmp_path / "again", resume=saved, beginning=found) if resumes else began
    world.league.league.roster.players["main-0"].steps += 1
    before = len(world.asked(world.learner, training_pb2.Restore))
    world.want(ResetPlayer("main-0"))
    assert len(world.asked(world.learner, training_pb2.Reset)) == 1
    last, weights = weights_given(world, before)
    assert last.weights
    assert last.whole == bool(whole), "what was not given stays as the seed has it"
    np.testing.assert_array_equal(weights, np.full(3, 7.0))


def frozen_rock(scale: float, size: int = 300, **more: Any) -> FrozenModule:
    """A module that is not trained; `more`: further arrays of it."""
    config, weights = RunConfig.from_flat({}), {"scale": np.full(size, scale, np.float32), **more}
    return FrozenModule.copied("rock", "default", config, {}, weights, {}, Version(1, 1), "default")


def weights_given(world: World, before: int = 0) -> tuple[training_pb2.Restore, Any]:
    """The last part that the learner was given to begin with, and the weights, after so many that
    it had been given before."""
    given = [each for _, each in world.asked(world.learner, training_pb2.Restore)][before:]
    reader = state_reader()
    (frame,) = [frame for each in given if (frame := reader.feed(each.chunk)) is not None]
    return given[-1], frame.tree["default"]["scale"]


@pytest.mark.parametrize("source", ["main-0-v0", "stone"])
def test_a_reset_gives_a_player_a_new_optimizer_and_then_the_weights_of_another_one(
    tmp_path: Path, source: str
) -> None:
    Asked.wanted.clear()
    world = World(tmp_path)
    world.parts.registry.frozen["rock"] = frozen_rock(7.0)
    world.want(FreezePlayer("main-0"), AddPlayer("stone", "fixed", learning=False, source="rock"))
    (asked,) = world.copies_asked_for()
    world.send_weights(asked)
    world.take_parts()
    assert world.plays(source)
    world.want(ResetPlayer("main-0", source))
    ((reset, _),) = world.asked(world.learner, training_pb2.Reset)
    assert all(reset < restore for restore, _ in world.asked(world.learner, training_pb2.Restore))
    last, weights = weights_given(world)
    assert last.module_id == "main-0"
    assert last.source == f"league: main-0, reset to the weights of {source}"
    assert not last.selectable
    assert last.weights
    assert last.whole
    np.testing.assert_array_equal(weights, np.full(300, 1.0 if source == "main-0-v0" else 7.0))
    assert world.league.league.roster.players["main-0"].life == 1


def test_a_new_player_begins_with_what_a_player_plays_with_that_does_not_learn(
    tmp_path: Path,
) -> None:
    Asked.wanted.clear()
    world = World(tmp_path)
    world.parts.registry.frozen["rock"] = frozen_rock(7.0)
    stone = AddPlayer("stone", "fixed", learning=False, source="rock")
    world.want(stone, AddPlayer("heir", "main", source="stone"))
    last, weights = weights_given(world)
    assert last.module_id == "heir"
    assert last.source == "league: heir, new with the weights of stone"
    np.testing.assert_array_equal(weights, np.full(300, 7.0))


@pytest.mark.parametrize(
    ("rock", "differs"),
    [
        (frozen_rock(7.0, size=3), "'scale', {} has shape [300], and they have shape [3]"),
        (
            frozen_rock(7.0, layer=np.zeros(3, np.float32)),
            "'layer', {} has nothing, and they have shape [3]",
        ),
    ],
    ids=["other shapes", "further arrays"],
)
def test_weights_of_another_network_are_told_and_the_league_goes_on(
    tmp_path: Path, rock: FrozenModule, differs: str
) -> None:
    Asked.wanted.clear()
    world = World(tmp_path)
    world.parts.registry.frozen["rock"] = rock
    world.want(FreezePlayer("main-0"), AddPlayer("stone", "fixed", learning=False, source="rock"))
    (asked,) = world.copies_asked_for()
    world.send_weights(asked)
    world.take_parts()
    league = world.league.league
    league.payoffs.book("main-0", "stone", 1)
    for _ in range(2):
        world.want(ResetPlayer("main-0", "stone"))
    main = league.roster["main-0"]
    assert (main.life, main.reset_at) == (0, 0), "it was not reset"
    assert league.payoffs.games("main-0", "stone") == 1, "nothing is forgotten"
    world.want(AddPlayer("heir", "main", source="stone"))
    assert not world.asked(world.learner, training_pb2.Reset)
    assert not world.asked(world.learner, training_pb2.Restore)
    other = f"the weights of stone are of another network: at {differs}"
    for told in (
        "Asked.build asked for what cannot be: main-0 cannot be reset to stone: "
        f"{other.format('main-0')}",
        f"heir cannot learn: {other.format('heir')}",
    ):
        assert world.told.messages.count(f"league: {told}") == 1
    assert world.plays("main-0")
    assert league.roster.players["heir"].retired


def test_a_player_that_does_not_learn_needs_a_module_that_is_not_trained(world: World) -> None:
    world.want(AddPlayer("odd", "fixed", learning=False, source="nosuch"))
    told = "league: odd cannot play: 'nosuch' is no module with train = false"
    assert told in world.told.messages
    assert world.league.league.roster.players["odd"].retired


def test_a_run_that_began_with_new_weights_has_nothing_to_keep(tmp_path: Path) -> None:
    assert kept(RunConfig.from_flat({}), tmp_path) is None
    with pytest.raises(CheckpointError, match="initial: there is no such file or directory"):
        kept(RunConfig.from_flat({"from_checkpoint": "runs/other"}), tmp_path)
