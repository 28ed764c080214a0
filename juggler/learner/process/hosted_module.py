"""One module of a learner process: its learner, batches, versions and counters."""

from __future__ import annotations

import json
import os
import struct
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from io import BufferedRandom
from typing import Any, Final

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from juggler.learner.algorithms.registry import build_learner
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.core.state_trees import StateMismatch
from juggler.learner.data.batch_store import BatchStore, HeldBatch
from juggler.learner.data.validation import BatchValidator
from juggler.learner.group.peers import PeerLost, Peers
from juggler.learner.group.ring_peers import RingAccess, RingPeers
from juggler.learner.group.torch_peers import GlooPeers, MeetingPoint
from juggler.learner.learner import Learner
from juggler.learner.process.learner_program import LearnerSetup, ModuleSetup, critic_space_of
from juggler.learner.process.overlap import (
    InTurn,
    Overlapped,
    PendingMetrics,
    UpdateBatches,
    is_asynchronous,
)
from juggler.runtime.actors.endpoints import is_loopback
from juggler.runtime.actors.worker import from_json
from juggler.runtime.checkpoints.weights import weights_in
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.leaves import at
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.modules.import_by_name import given_or_named
from juggler.runtime.streams.shared_memory import memory_file
from juggler.runtime.streams.weights_stream import WeightsPublisher
from juggler.runtime.wire.frames import Frame, FrameReader, encode_frame
from juggler.runtime.wire.spaces import space_from_message
from juggler.runtime.wire.structures import has_bounds, space_leaves
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2

#: Metric: share of clipped actions.
CLIPPED: Final = "clipped_actions"
_NEARLY_ALL = 0.9
_ROUNDING = 1e-5  # relative to a bound, or to 1 if the bound is smaller


def learner_for(
    command: training_pb2.AddModule,
    module_factory: Any,
    own_classes: Mapping[str, type[Any]] | None,
    device: str,
) -> Learner:
    """Build a module's learner from the driver's command and script code.

    Raises:
        ValueError: a part cannot be built.
    """
    setup = from_json(command.config, ModuleSetup)
    return build_learner(
        setup.learner,
        given_or_named(setup.module.module, module_factory, own_classes),
        space_from_message(command.observation_space),
        space_from_message(command.action_space),
        setup.module.model,
        distribution=setup.module.distribution,
        critic_space=critic_space_of(command),
        check_specs=setup.module.check_specs,
        connectors=ConnectorsConfig.parse(setup.connectors),
        own_connectors=own_classes,
        device=device,
        seed=command.seed,
    )


@dataclass(eq=False)
class HostedModule:
    """A learner process's module, with a method per driver command.

    Args:
        command: the command that added the module.
        learner: trains the module.
        membership: its group of learners.
        publisher: serves the weights of all modules of the process.
        handover: passes the module's state to the next program if this one loses its driver.
        arrived: called for each stored batch, in the server's thread.
        warn: shows a warning.
        next_update: returns the next update command, if it has already arrived.
        setup: settings of the process. If it is synchronous, the metrics of every update are
            reported, so that the lines of two runs are equal.

    Attributes:
        module_id: id of the module.
        store: batches that wait for an update.
        updating: does the work around updates.
    """

    command: training_pb2.AddModule
    learner: Learner
    membership: Membership
    publisher: WeightsPublisher
    handover: StateHandover
    arrived: Callable[[HeldBatch], None]
    warn: Callable[[str], None]
    next_update: Callable[[], training_pb2.Update | None]
    setup: LearnerSetup

    def __post_init__(self) -> None:
        command, learner = self.command, self.learner
        self.module_id = command.module_id
        observed = space_from_message(command.observation_space)
        acted = space_from_message(command.action_space)
        states, critic = learner.example_states(), critic_space_of(command)
        validator = BatchValidator(self.module_id, observed, acted, states, critic)
        self.store = BatchStore(validator, self.arrived)
        learner.check_serves("episodes")
        # On a GPU, the host prepares the next update while the device computes this one.
        self.updating = InTurn(learner, self._send_weights)
        if is_asynchronous(learner.device):
            self.updating = Overlapped(learner, self._send_weights, self._coming)
        self._generation = 0
        self._joined = False  # a group has formed
        self._published = Version(0, 0)
        self._restoring: FrameReader[training_pb2.StateHeader] | None = None
        self._has_newer = False  # whether to ignore a state that the driver restores
        self._template: list[EpisodeBatch] = []  # one batch of an earlier update
        self._steps_trained = 0  # including steps that a replay keeps for later
        self._steps_dropped = 0
        self._metrics = PendingMetrics(self.module_id, every_update=self.setup.synchronous)
        self._clipped = ClippedActions(self.module_id, acted, self.warn)

    @property
    def version(self) -> Version:
        """Version of the learner's weights."""
        return Version(self._generation, self.learner.updates)

    def take_over(
        self, run_id: str, command: training_pb2.AddModule, ready: training_pb2.ModuleReady
    ) -> None:
        """Continue from the previous program's state, if the driver permits."""
        version = self.handover.take_over(self.learner, run_id, command, ready)
        if version is not None:
            self._generation, self._has_newer = version.generation, True

    def close(self) -> None:
        """End the threads of updates, leave the group, and withdraw the weights."""
        self.updating.close()
        self.learner.leave()
        self.publisher.withdraw(self.module_id)

    # -- state ------------------------------------------------------------------------------------

    def restore(self, part: training_pb2.Restore) -> None:
        """Receive a part of a state to continue from.

        Raises:
            ValueError: the state does not fit this learner, which has not changed.
        """
        if self._has_newer:
            self._has_newer = not part.last
            return
        # A state is larger than a message, and comes in parts.
        if self._restoring is None:
            self._restoring = FrameReader(training_pb2.StateHeader, part.state_bytes, digests=True)
        frame = self._restoring.feed(part.chunk)
        if not part.last:
            return
        self._restoring = None
        if frame is None or not isinstance(frame.tree, dict):
            raise ValueError("the state to continue from is not complete")
        if not part.weights:
            try:
                return self.learner.restore(frame.tree, json.loads(frame.header.extra))
            except StateMismatch as error:
                raise StateMismatch(f"module {self.module_id!r}: {error}") from error
        # Weights from elsewhere: the rest of the state is new.
        weights = frame.tree[DEFAULT_MODULE]
        if part.source:
            begin_with(
                self.learner,
                weights,
                part.source,
                whole=part.whole,
                selectable=part.selectable,
            )
        else:
            self.learner.set_weights(weights, whole=part.whole)

    def snapshot(self, command: training_pb2.Snapshot) -> Iterator[bytes]:
        """Encode the state or the weights as a frame, unaffected by updates."""
        tree: dict[str, Tree]
        if command.weights:
            tree, extra = {DEFAULT_MODULE: self.learner.get_weights()}, "{}"
        elif command.whole:
            tree, extra = {**weights_in(self.learner.save()[0], acting=True)}, "{}"
        else:
            tree, saved = self.learner.save()
            extra = json.dumps(saved)
            self.publish_news()  # the weights may be the run's last
        header = training_pb2.StateHeader(
            module_id=self.module_id, version=self.version.message(), extra=extra
        )
        return encode_frame(header, tree, digest=True)

    def publish_news(self) -> None:
        """Publish weights of a new version that EnvRunners may use."""
        if self._joined and self.version != self._published and not self.membership.lost:
            self._publish()

    # -- group ------------------------------------------------------------------------------------

    def join(
        self, group: training_pb2.Group, superseded: Callable[[], bool]
    ) -> training_pb2.GroupFormed:
        """Join a group, starting from the state with the most updates."""
        self.updating.forget()
        self._has_newer = False  # a later Restore belongs to a reset
        if not self._joined:
            self._joined = True
            self.store.serve(joined=group.generation)
        formed = self.membership.form(group, self.learner, superseded)
        self._generation = group.generation
        self.handover.weights_known = True
        if not formed.peer_lost:
            self._publish()
        return formed

    @property
    def serves(self) -> bool:
        """Whether EnvRunners should send batches."""
        return self._joined and not self.membership.lost

    # -- updates ----------------------------------------------------------------------------------

    def update(
        self,
        update: training_pb2.Update,
        seconds: MutableMapping[str, float],
        *,
        publishes: bool = True,
    ) -> training_pb2.UpdateDone:
        """Make an update.

        Args:
            update: the command, with ids of the batches.
            seconds: the process's time by activity; this update's time is added.
            publishes: whether to publish the new weights.

        Raises:
            ValueError: the core has no schedule that it sets.
        """
        self.learner.use_values(update.values)
        started, collated = time.perf_counter(), self.learner.collate_seconds
        batches, missing = self.store.pop(update.batch_ids)
        done = training_pb2.UpdateDone(module_id=self.module_id, update_id=update.update_id)
        # Staleness counts from the weights before this update.
        before, taken_in = self.learner.updates, self.learner.data.taken_in()
        share = self._due(batches)
        if share is not None:
            try:
                sample = self.updating.sample(share)
                # A replay that is still filling up yields no samples.
                if found := self.learner.step(sample):
                    self._metrics.add(found)
                self.updating.made()
            except PeerLost as error:
                self.membership.lose(self.learner, str(error))
        done.peer_lost = self.membership.lost
        is_kept = self.learner.data.taken_in() > taken_in
        self._book(done, batches, missing, before, is_kept=is_kept)
        updated = time.perf_counter()
        has_learned = share is not None and not done.peer_lost
        # Without a step, the weights are those already published.
        if (
            publishes
            and has_learned
            and self.learner.updates % self.learner.config.weights_interval == 0
        ):
            self._publish()
        # Measured only when other metrics are sent: twice a second is enough.
        if metrics := self._metrics.collect(self.learner.updates):
            metrics |= self._clipped.metrics(batch.episodes for batch in batches)
        self._complete(done, metrics, seconds)
        # In case the driver misses this answer.
        self.handover.updated(done, self.setup.updates_in_flight)
        collated = self.learner.collate_seconds - collated
        seconds["collate"] += collated
        seconds["update"] += updated - started - collated
        seconds["publish"] += time.perf_counter() - updated
        return done

    def last_metrics(self, seconds: Mapping[str, float]) -> training_pb2.UpdateDone:
        """Report all metrics so far, at the end of a run."""
        done = training_pb2.UpdateDone(module_id=self.module_id)
        self._complete(done, self._metrics.collect_all(self.learner.updates), seconds)
        return done

    def _complete(
        self,
        done: training_pb2.UpdateDone,
        metrics: Mapping[str, float],
        seconds: Mapping[str, float],
    ) -> None:
        """Add metrics, version and counters to a reply."""
        # Also while a replay fills, before any update.
        done.replay.update(self.learner.data.books())
        if metrics:
            done.metrics[self.module_id].values.update(metrics)
        if metrics or done.replay:
            done.seconds.update(seconds)
        done.hopeless = self._metrics.hopeless
        done.version.CopyFrom(self.version.message())
        done.steps_trained = self._steps_trained
        done.steps_dropped = self._steps_dropped

    def discard(self, batch_ids: Iterable[int]) -> None:
        """Discard these batches."""
        dropped, _missing = self.store.pop(batch_ids)
        self._steps_dropped += sum(batch.live_steps for batch in dropped)

    def update_exactly(self, update: training_pb2.Update) -> training_pb2.UpdateDone:
        """Make an update that uses all of its batches, or changes nothing.

        Raises:
            ValueError: a batch was refused, or the gradients are not finite.
        """
        batches = self.store.take(update.batch_ids)
        updated = self.learner.update_from_episodes(
            [batch.episodes for batch in batches],
            minibatch_size=update.minibatch_size or None,
            num_epochs=update.num_epochs or None,
        )
        metrics = fetch_metrics(updated)
        if metrics.get("skipped") == 1.0:
            self.learner.forget()  # otherwise unsaved samples would be used again
            raise ValueError(
                "the loss or its gradients were not finite, so this update changed nothing. "
                "Lower lr, or check the episodes"
            )
        # Only now is it certain that all batches were used.
        done = training_pb2.UpdateDone(
            module_id=self.module_id, update_id=update.update_id, version=self.version.message()
        )
        done.metrics[self.module_id].values.update(metrics)
        for batch in batches:
            done.batches.add(batch_id=batch.batch_id, live_steps=batch.live_steps)
        return done

    def _book(
        self,
        done: training_pb2.UpdateDone,
        batches: Iterable[HeldBatch],
        missing: Iterable[int],
        update: int,
        *,
        is_kept: bool,
    ) -> None:
        """Book the batches of an update in its reply.

        Args:
            done: the reply, which gets an entry for each batch.
            batches: batches found in the store.
            missing: ids of batches not found.
            update: number of the weights that the update started from.
            is_kept: whether a replay has the batches for later, even if this update has failed.
        """
        for batch in batches:
            staleness = batch.staleness(update)
            used = done.batches.add(
                batch_id=batch.batch_id, live_steps=batch.live_steps, staleness=staleness
            )
            if staleness > self.learner.config.max_staleness:
                used.dropped = "stale"
            elif done.peer_lost and not is_kept:
                used.dropped = "learner_lost"
            if used.dropped:
                self._steps_dropped += batch.live_steps
            else:
                self._steps_trained += batch.live_steps
        for batch_id in missing:
            done.batches.add(batch_id=batch_id, dropped="restart")

    def _due(self, batches: list[HeldBatch]) -> UpdateBatches | None:
        """Return the current update's share; None: no fresh batch or no group."""
        share = self._share(batches, self.learner.updates)
        episodes = share.episodes
        if self.learner.in_group:
            # The others cannot continue without this learner. Without a fresh batch, it takes part
            # with a batch without live steps.
            templates = [batch.episodes for batch in batches[:1]] or self._template
            episodes = episodes or [each.silenced() for each in templates]
            self._template = list(episodes[:1])
        if not episodes or self.membership.lost:
            return None
        return share._replace(episodes=episodes)

    def _share(self, batches: list[HeldBatch], update: int) -> UpdateBatches:
        """Select batches that are fresh enough for an update from these weights."""
        most = self.learner.config.max_staleness
        fresh = [batch for batch in batches if batch.staleness(update) <= most]
        episodes = [batch.episodes for batch in fresh]
        return UpdateBatches([batch.batch_id for batch in fresh], episodes)

    def _coming(self) -> UpdateBatches | None:
        """Predict the next update's share; None: no request or fresh batch."""
        update = self.next_update()
        if update is None or update.exact or update.module_id != self.module_id:
            return None
        share = self._share(self.store.peek(update.batch_ids), self.learner.updates + 1)
        return share if share.batch_ids else None

    def _publish(self) -> None:
        self.updating.publish(self.version)
        self._published = self.version

    def _send_weights(self, version: Version, weights: dict[str, Tree]) -> None:
        self.publisher.publish(version, {self.module_id: weights}, self.module_id)


def begin_with(
    learner: Learner, weights: Mapping[str, Tree], source: str, *, whole: bool, selectable: bool
) -> None:
    """Initialize a learner with weights from elsewhere.

    Args:
        weights: name -> array.
        source: their origin, for errors: a key with its value, or a description.
        whole: whether missing weights are an error.
        selectable: whether `from_parameters` can select some of the weights.

    Raises:
        ValueError: the weights do not fit the module.
    """
    try:
        learner.set_weights(weights, whole=whole)
    except ValueError as error:
        hint = ". They are of another network, or of other observations or actions" if whole else ""
        if whole and selectable:
            hint += ". To take only some, name them in from_parameters"
        text = str(error)
        hint = hint.removeprefix(".") if text.endswith("?") else hint
        raise ValueError(f"{source}: {text}{hint}") from error


class ClippedActions:
    """Measures the share of a module's action values that are clipped.

    Args:
        module_id: id of the module, for the warning.
        action_space: action space of the policy.
        warn: shows a warning, once, if nearly all values are clipped.
    """

    def __init__(
        self, module_id: str, action_space: gymnasium.Space[Any], warn: Callable[[str], None]
    ) -> None:
        self._module_id, self._warn = module_id, warn
        boxes = {
            path: leaf
            for path, leaf in space_leaves(action_space)
            if isinstance(leaf, spaces.Box) and leaf.dtype.kind == "f"
        }
        self._bounds = {}
        for path, box in boxes.items():
            if np.any(has_bounds(box)):
                low = box.low - _ROUNDING * np.maximum(1, np.abs(box.low))  # [...]
                high = box.high + _ROUNDING * np.maximum(1, np.abs(box.high))  # [...]
                self._bounds[path] = low, high
        # A new policy's actions are about as large as these bounds: larger ones were learned.
        self._suits = all(((box.low == -1) & (box.high == 1)).all() for box in boxes.values())

    def metrics(self, batches: Iterable[EpisodeBatch]) -> dict[str, float]:
        """Return the share of clipped values; {}: no live action has bounds."""
        outside = numbers = 0
        for batch in batches:
            for path, (low, high) in self._bounds.items():
                actions = at(batch.actions, path)[batch.live]  # [live steps, ...]
                outside += int(np.count_nonzero((actions < low) | (actions > high)))
                numbers += actions.size
        if not numbers:
            return {}
        share = outside / numbers
        # The warning comes once; the metric shows what follows.
        if share >= _NEARLY_ALL and not self._suits:
            self._suits = True
            self._warn(
                f"found {share:.0%} of the numbers in actions of module {self._module_id!r} "
                "outside the bounds of the action space: all of them become a bound, and "
                'little can be learned so. Set connectors.module_to_env = ["rescale_actions"], '
                "which maps [-1, 1] to finite bounds, or model.squash = true"
            )
        return {CLIPPED: share}


#: Environment variable with the file's descriptor, which stays open across `exec`.
_VARIABLE = "JUGGLER_STATE_HANDOVER"
_SIZE = struct.Struct("<Q")  # before each chunk

HandoverFrame = Frame[training_pb2.HandoverHeader]


class StateHandover:
    """Hands a module's state from one program to the next.

    Attributes:
        weights_known: whether the driver knows this module's weights. Only then is its state
            handed over.

    Args:
        received: the module's state from the previous program, see `receive`; None: no state.
    """

    def __init__(self, received: HandoverFrame | None = None) -> None:
        self.weights_known = False
        self._received = received
        self._last_updates: deque[training_pb2.UpdateDone] = deque()

    def updated(self, done: training_pb2.UpdateDone, most_in_flight: int) -> None:
        """Remember an update, since the driver may miss recent replies."""
        self._last_updates.append(
            training_pb2.UpdateDone(
                module_id=done.module_id,
                update_id=done.update_id,
                version=done.version,
                batches=done.batches,
            )
        )
        while len(self._last_updates) > most_in_flight:
            self._last_updates.popleft()

    def take_over(
        self,
        learner: Learner,
        run_id: str,
        command: training_pb2.AddModule,
        ready: training_pb2.ModuleReady,
    ) -> Version | None:
        """Restore the received state if it is new enough for the command.

        It is reported in `ready`.

        Returns:
            The version of the restored weights; None if nothing was restored.

        Raises:
            StateMismatch: the state belongs to another module, optimizer or algorithm.
        """
        received, self._received = self._received, None
        if received is None or received.header.run_id != run_id:
            return None
        if not command.HasField("oldest_handover"):
            return None
        version = Version.of(received.header.version)
        if version < Version.of(command.oldest_handover):
            return None
        learner.restore(received.tree, json.loads(received.header.extra))
        self.weights_known = True
        self._last_updates.extend(received.header.last_updates)
        ready.handed_over.CopyFrom(received.header.version)
        ready.last_updates.extend(received.header.last_updates)
        return version

    def chunks(
        self, module_id: str, learner: Learner, run_id: str, version: Version
    ) -> Iterator[bytes]:
        """Encode the state for `hand_over`; `run_id` is the lost driver's."""
        tree, extra = learner.save()
        header = training_pb2.HandoverHeader(
            module_id=module_id,
            run_id=run_id,
            version=version.message(),
            extra=json.dumps(extra),
            last_updates=self._last_updates,
        )
        return encode_frame(header, tree, digest=True)


def hand_over(frames: Iterable[Iterator[bytes]]) -> None:
    """Write framed states for the program that replaces this one."""
    number = _file()
    with os.fdopen(number, "wb", closefd=False) as file:
        for frame in frames:
            for chunk in frame:
                file.write(_SIZE.pack(len(chunk)) + chunk)
    os.environ[_VARIABLE] = str(number)


def receive() -> dict[str, HandoverFrame]:
    """Read the states handed over, by module id, once.

    Raises:
        ValueError: the file ends in the middle of a state.
    """
    number = os.environ.pop(_VARIABLE, "")
    if not number:
        return {}
    frames: dict[str, HandoverFrame] = {}
    with os.fdopen(int(number), "w+b") as file:
        most_bytes = os.fstat(file.fileno()).st_size
        file.seek(0)
        reader, frame = FrameReader(training_pb2.HandoverHeader, most_bytes, digests=True), None
        for chunk in _chunks(file):
            frame = reader.feed(chunk)
            if frame is not None:
                frames[frame.header.module_id] = frame
        if frame is None:
            raise ValueError(f"the state in {_VARIABLE} ends in the middle")
    return frames


def _file() -> int:
    """Return the descriptor of an unnamed file that stays open across `exec`."""
    try:
        return memory_file("juggler-state-handover")
    except OSError:  # no files in memory on this system
        with tempfile.TemporaryFile() as on_disk:
            number = os.dup(on_disk.fileno())
        os.set_inheritable(number, True)
        return number


def _chunks(file: BufferedRandom) -> Iterator[bytes]:
    while size := file.read(_SIZE.size):
        yield file.read(*_SIZE.unpack(size))


#: Prefix of the address of a learner that sums over encrypted streams.
_ENCRYPTED = "tls:"


@dataclass(eq=False)
class Membership:
    """Forms groups with a module's other learners on the driver's command.

    Args:
        worker_id: id of this learner.
        host: address where other learners can reach this process.
        insecure: whether the network between them is trusted.
        ring: access to sums over encrypted streams; None: sums use torch.distributed.
        progresses: called while a group forms and this learner does not hang.

    Attributes:
        lost: why the group of the current generation cannot update; "" while it can.
    """

    worker_id: str
    host: str
    insecure: bool = False
    ring: RingAccess | None = None
    progresses: Callable[[], None] = lambda: None
    lost: str = field(default="", init=False)

    def meeting_address(self) -> str:
        """Return the address for other learners; "": this one must train alone.

        This is the case if the address is reachable from outside, without encryption, and
        `insecure` is not set.
        """
        if self.ring is not None:
            return f"{_ENCRYPTED}{self.ring.address}"
        return self._meeting_point.address if self.insecure or is_loopback(self.host) else ""

    @cached_property
    def _meeting_point(self) -> MeetingPoint:
        if not is_loopback(self.host):
            # torch.distributed has neither encryption nor authentication, even if gRPC has.
            text = "learners of a group talk to each other unencrypted and unauthenticated, at"
            text += f" {self.host}, even with TLS: keep that network private"
            print(f"juggler {self.worker_id}: {text}", file=sys.stderr)
        return MeetingPoint(self.host)

    def form(
        self, group: training_pb2.Group, learner: Learner, superseded: Callable[[], bool]
    ) -> training_pb2.GroupFormed:
        """Meet the other members, and agree on one state.

        Args:
            group: the command, with the members.
            learner: this learner, which updates with them from now on.
            superseded: returns whether the driver has requested another group.
        """
        self.lost = ""
        learner.leave()
        formed = training_pb2.GroupFormed(module_id=group.module_id, generation=group.generation)
        peers: Peers | None = None
        try:
            if superseded():  # hashing a large state takes long
                raise PeerLost("there is another group to form")
            if len(group.members) > 1:
                peers = self._met(group, learner.device, superseded)
                peers.progresses = self.progresses
            # The driver compares the hashes of all members.
            formed.state_hash = learner.join(peers) % 2**64
        except PeerLost as error:
            if peers is not None:
                peers.close()
            self.lose(learner, str(error))
            formed.peer_lost = self.lost
        formed.update = learner.updates
        return formed

    def _met(
        self, group: training_pb2.Group, device: torch.device, superseded: Callable[[], bool]
    ) -> Peers:
        rank = list(group.members).index(self.worker_id)
        points = list(group.meeting_points)
        if self.ring is not None:
            addresses = [point.removeprefix(_ENCRYPTED) for point in points]
            name = f"{group.module_id}/{group.generation}"
            return RingPeers(self.ring, name, rank, addresses, superseded)
        # A learner that started alone has no meeting point.
        point = next(each for each in points if each)
        return GlooPeers(point, group.generation, rank, len(points), self.host, superseded, device)

    def lose(self, learner: Learner, why: str) -> None:
        """Leave a broken group: no updates until the next group."""
        self.lost = why
        learner.leave()
