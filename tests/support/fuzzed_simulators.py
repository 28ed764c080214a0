"""Simulators with random behaviour, valid or wild, that remember it."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any, NamedTuple

import numpy as np

from juggler.client.space_values import Values
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.v1 import simulator_pb2 as pb
from support.fuzzed_gateway import (
    MOST_UPDATES,
    RESUME_SECONDS,
    Episode,
    FuzzedGateway,
    Step,
    Stream,
)
from support.gateway_world import TWO_WAYS, hello


class Told(NamedTuple):
    """A message's contents: steps of environments, or several of one.

    Attributes:
        paused: which rows want no action.
    """

    steps: list[Any]
    places: list[Place]
    paused: list[bool]


class Place:
    """One environment.

    Attributes:
        shown: the last observation of the episode that runs; None: none does.
        action: the last one, with the weights that chose it; None: it is due, or none was asked
            for.
        due: an answer is.
        runs: an episode does, of one of several agents.
        rests: it has ended, and others of its environment have not.
    """

    def __init__(self) -> None:
        self.episode = Episode()
        self.shown: Any = None
        self.action: tuple[int, Version] | None = None
        self.due = self.runs = self.rests = False


class Simulator:
    """One session after another, in one mode.

    Attributes:
        inbox: what is on its way to the gateway; None: that nothing more comes.
        unanswered: by seq, messages and what they tell.
        told: seqs that the gateway has got.
        wild: it has sent damaged messages: every answer is right.
        ended: returns and lengths of episodes that the gateway knows the end of.
        may_end: and of episodes whose end it may know.
    """

    mode: Any = pb.REMOTE_INFERENCE
    #: Of what it tells of each step: its reward, and nothing.
    info_names: tuple[str, ...] = ("reward", "nothing")

    def __init__(self, gateway: FuzzedGateway) -> None:
        self.gateway, self.rng = gateway, gateway.rng
        self.wild = False
        self.ended: Counter[tuple[float, int]] = Counter()
        self.may_end: Counter[tuple[float, int]] = Counter()
        self.real_time = self.rng.random() < 0.2
        self.begin()

    # -- its connections ------------------------------------------------------------------------

    def begin(self) -> None:
        """A new session."""
        self.places = [Place() for _ in range(self.rng.choice((1, 1, 2, 3)))]
        self.seq = 0
        self.token = ""
        self.unanswered: dict[int, tuple[pb.FromSimulator, Told]] = {}
        self.told: set[int] = set()
        self.lost_at: float | None = None
        self.leaves = False
        self.connect()

    @property
    def here(self) -> bool:
        """It may speak."""
        return self.welcome is not None and not self.leaves

    @property
    def may_be_over(self) -> bool:
        """Its session may be closed."""
        late = self.lost_at is not None and self.gateway.time.now - self.lost_at > RESUME_SECONDS
        return self.leaves or late

    def connect(self) -> None:
        """Go on with the session, or begin it."""
        self.stream = Stream()
        self.inbox: list[tuple[Stream, bytes | None]] = []
        self.welcome: pb.Welcome | None = None
        self.post(pb.FromSimulator(hello=self.greeting()))

    def greeting(self) -> pb.Hello:
        changes: dict[str, Any] = {"resume_token": self.token, "real_time": self.real_time}
        changes["info_names"] = self.info_names
        return hello(self.gateway.space, mode=self.mode, environments=len(self.places), **changes)

    def post(self, message: pb.FromSimulator) -> None:
        self.inbox.append((self.stream, message.SerializeToString()))

    def vanish(self) -> None:
        """Break the connection: messages in transit may be lost."""
        self.inbox = self.inbox[: self.rng.randint(0, len(self.inbox))]
        self.inbox.append((self.stream, None))
        exchange([self], reads=False)
        self.stream.unread.clear()
        self.welcome = None
        if self.lost_at is None:
            self.lost_at = self.gateway.time.now

    def come_back(self) -> None:
        """Whether or not the connection before has ended."""
        if not self.token:
            return self.begin()
        before = self.stream
        if self.rng.random() < 0.5:
            before.unread.clear()
        self.read()
        self.connect()
        if self.rng.random() < 0.5:
            self.inbox.append((before, None))

    def leave(self) -> None:
        self.leaves = True
        self.post(pb.FromSimulator(goodbye=pb.Goodbye(reason="enough")))
        exchange([self])
        self.gateway.wait(0.1)
        self.over()

    def go_wild(self) -> None:
        """Send damaged messages from now on."""
        if not self.token:
            return
        self.wild = self.gateway.wild = True
        known = [whole.SerializeToString() for whole, _ in self.unanswered.values()]
        known += [message for _, message in self.inbox if message] or [b""]
        for _ in range(self.rng.randint(1, 4)):
            self.inbox.append((self.stream, damaged(self.rng, self.rng.choice(known))))

    def note(self, message: bytes) -> None:
        """The gateway gets this."""
        told = pb.FromSimulator.FromString(message)
        seq = told.steps.seq or told.recording.seq
        if seq and seq not in self.told:
            self.told.add(seq)
            self.happened(self.unanswered[seq][1])

    def read(self) -> None:
        """What the gateway says."""
        while self.stream.unread and not self.wild:
            message = self.stream.unread.popleft()
            kind = message.WhichOneof("message")
            if kind == "error":
                assert self.may_be_over, f"a correct simulator gets {message.error}"
                assert message.error.code == pb.Error.UNKNOWN_SESSION
                self.over()
                return self.begin()
            if kind == "welcome":
                self.welcomed(message.welcome)
            elif kind in ("actions", "recorded"):
                answer = getattr(message, kind)
                if answer.seq in self.unanswered:
                    _, about = self.unanswered.pop(answer.seq)
                    self.answered(about, answer)
                else:
                    assert answer.seq in self.told, "an answer to nothing"
            else:
                self.hears(message)
        self.stream.unread.clear()

    def welcomed(self, welcome: pb.Welcome) -> None:
        assert welcome.resumed == bool(self.token)
        assert welcome.last_seq == max(self.told, default=0)
        self.welcome, self.token = welcome, welcome.resume_token
        self.lost_at = None
        for message, _ in self.unanswered.values():
            self.post(message)

    def over(self) -> None:
        """The session is closed."""
        lost = [about for seq, (_, about) in self.unanswered.items() if seq not in self.told]
        episodes = [step.episode for about in lost for step in about.steps if step]
        for episode in dict.fromkeys([place.episode for place in self.places] + episodes):
            self.cut(episode)

    def cut(self, episode: Episode) -> None:
        """It is over without an end of its own."""
        episode.cut = True

    def ask(self, message: str, about: Told, **fields: Any) -> None:
        """Send what has an answer."""
        self.seq += 1
        whole = pb.FromSimulator(**{message: {"seq": self.seq, **fields}})
        self.unanswered[self.seq] = whole, about
        self.post(whole)

    # -- what it does ---------------------------------------------------------------------------

    def act(self) -> None:
        """Say something right, where it is the time for that."""

    def happened(self, about: Told) -> None:
        """The gateway got a message."""

    def answered(self, about: Told, answer: Any) -> None:
        """A message has its answer."""

    def hears(self, message: pb.ToSimulator) -> None:
        """Something else."""

    def step(self, place: Place, observation: Any, after: Any, action: int, version: Any) -> Step:
        """Take one."""
        known = self.gateway.known
        while (reward := float(self.rng.randrange(1, 1 << 20))) in known:
            pass
        offset = len(place.episode.steps)
        known[reward] = Step(
            self, place.episode, offset, observation, action, reward, after, version
        )
        place.episode.steps.append(known[reward])
        return known[reward]

    def look(self) -> Any:
        return np.array([self.rng.uniform(-1, 1) for _ in range(3)], np.float32)


def exchange(simulators: list[Simulator], reads: bool = True) -> None:
    """Deliver all messages to the gateway, and its answers.

    Args:
        simulators: at least one.
        reads: they get the answers.
    """
    gateway = simulators[0].gateway
    boxes = [(each, each.inbox) for each in simulators if each.inbox]
    for each in simulators:
        each.inbox = []
    said = []
    while boxes:
        each, box = gateway.rng.choice(boxes)
        stream, message = box.pop(0)
        if message is not None and stream is each.stream and not (each.wild or stream.closed):
            each.note(message)
        said.append((stream, message))
        boxes = [(each, box) for each, box in boxes if box]
    gateway.hear(said)
    if reads:
        for each in simulators:
            each.read()


def damaged(rng: Random, message: bytes) -> bytes:
    """Bytes flipped, cut out, put in or repeated."""
    content = bytearray(message)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, count = rng.randrange(len(content) + 1), rng.randint(1, 12)
        match rng.randrange(4):
            case 0 if at < len(content):
                content[at] ^= 1 << rng.randrange(8)
            case 1:
                del content[at : at + count]
            case 2:
                content[at:at] = rng.randbytes(count)
            case 3:
                content[at:at] = content[at : at + 4 * count]
    return bytes(content)


ENDS = "terminated", "truncated"
CHOSEN = Values(space_to_message(TWO_WAYS))


class Remote(Simulator):
    """The gateway acts."""

    def act(self) -> None:
        ready = [n for n, place in enumerate(self.places) if not place.due]
        if not self.here or not ready or len(self.unanswered) >= self.welcome.batches_in_flight:
            return
        chosen = self.rng.sample(ready, self.rng.randint(1, len(ready)))
        rows: dict[str, Any] = {"rewards": [], "infos": []}
        rows |= {"terminated": [], "truncated": [], "paused": []}
        shown, finals, final_rows, steps = [], [], [], []
        for at, place in enumerate(self.places[n] for n in chosen):
            step, ends, paused, final, observation = self._row(place)
            steps.append(step)
            rows["rewards"].append(step.reward if step else self.rng.random())
            rows["terminated"].append(ends == "terminated")
            rows["truncated"].append(
                bool(ends) and (ends == "truncated" or self.rng.random() < 0.3)
            )
            rows["paused"].append(paused)
            shown.append(observation)
            rows["infos"] += [rows["rewards"][-1], np.nan]
            if final is not None:
                finals.append(final)
                final_rows.append(at)
        if finals:
            rows["final_rows"] = final_rows
            rows["final_observations"] = self.gateway.tensors(finals, masks=False)
        for name in ("terminated", "truncated", "paused"):
            if not any(rows[name]):
                del rows[name]
        if chosen != list(range(len(self.places))):
            rows["environments"] = chosen
        observations = self.gateway.tensors(shown)
        places = [self.places[n] for n in chosen]
        about = Told(steps, places, rows.get("paused", [False] * len(chosen)))
        self.ask("steps", about, agents=[pb.Rows(observations=observations, **rows)])

    def _row(self, place: Place) -> tuple[Step | None, str, bool, Any, Any]:
        """One row: its step, its end, its final observation and next one."""
        place.due = True
        if place.action is None:
            place.shown = self.look()
            return None, "", False, None, place.shown
        ends = self.rng.choice(("", "", "", "", "terminated", "truncated"))
        after = self.look()
        step = self.step(place, place.shown, after, *place.action)
        step.ends = ends
        place.action = None
        place.shown = after
        if not ends:
            return step, "", False, None, after
        place.episode, place.shown = Episode(), self.look()
        final: Any = after
        if ends == "terminated":  # it is ignored
            final = self.rng.choice((None, after, np.full(3, np.nan, np.float32)))
        if self.rng.random() < 0.3:
            return step, ends, True, final, np.full(3, np.inf, np.float32)
        return step, ends, False, final, place.shown

    def happened(self, about: Told) -> None:
        for step in about.steps:
            if step is not None:
                old = step.version.update + MOST_UPDATES < self.gateway.most_updates
                step.sent, step.may_miss = True, self.real_time or old
                if step.ends:
                    self._ended(step.episode)

    def answered(self, about: Told, answer: pb.ActionBatch) -> None:
        actions = [each for part in answer.agents for each in _chosen(part)]
        for place, chosen, paused in zip(about.places, actions, about.paused, strict=True):
            place.due = False
            if not paused:
                assert self.gateway.legal(place.shown)[chosen[0]]
                place.action = chosen

    def _ended(self, episode: Episode) -> None:
        self.ended[episode.total] += 1
        self.may_end[episode.total] += 1


class Several(Remote):
    """The gateway acts for one to three agents in each environment."""

    def begin(self) -> None:
        self.agents = self.rng.choice((1, 2, 2, 3))
        super().begin()

    def connect(self) -> None:
        if not self.token:  # a place for each agent of each environment
            self.places = [Place() for _ in range(len(self.places) * self.agents)]
        super().connect()

    def greeting(self) -> pb.Hello:
        greeting = super().greeting()
        greeting.environments //= self.agents
        (agent,) = greeting.agents
        for number in range(self.agents):
            each = greeting.agents.add() if number else agent
            each.CopyFrom(agent)
            each.id = f"agent {number}"
        return greeting

    def act(self) -> None:
        ready = [n for n, place in enumerate(self.places) if not (place.due or place.rests)]
        if not self.here or not ready or len(self.unanswered) >= self.welcome.batches_in_flight:
            return
        chosen = self.rng.sample(ready, self.rng.randint(1, len(ready)))
        ends = {
            n: "" if self.places[n].action is None else self.rng.choice(("", "", *ENDS))
            for n in chosen
        }
        over = self._over({n for n in chosen if ends[n]})
        parts: list[pb.Rows] = []
        told = Told([], [], [])
        for number in self.rng.sample(range(self.agents), self.agents):
            mine = [n for n in chosen if n % self.agents == number]
            if mine:
                rows = pb.Rows(agent=number, environments=[n // self.agents for n in mine])
                finals: list[Any] = []
                shown = [self._add(rows, n, ends[n], over, told, finals) for n in mine]
                rows.observations.extend(self.gateway.tensors(shown))
                if finals:
                    rows.final_observations.extend(self.gateway.tensors(finals, masks=False))
                parts.append(rows)
        for n, place in enumerate(self.places):
            if n // self.agents in over:
                place.rests = False
        self.ask("steps", told, agents=parts)

    def _over(self, ended: set[int]) -> set[int]:
        """The environments in which all agents end now."""
        running = {n for n, place in enumerate(self.places) if place.runs}
        return {n // self.agents for n in ended} - {n // self.agents for n in running - ended}

    def _add(
        self, rows: pb.Rows, n: int, ends: str, over: set[int], told: Told, finals: list[Any]
    ) -> Any:
        """Add one agent's row; append truncated agents' observations to `finals`."""
        place, is_over = self.places[n], n // self.agents in over
        place.due = True
        step: Step | None = None
        after = self.look()
        paused = bool(ends) and (not is_over or self.rng.random() < 0.3)
        if place.action is not None:
            step = self.step(place, place.shown, after, *place.action)
            step.ends, place.action = ends, None
        place.shown, place.runs, place.rests = after, not paused, paused and not is_over
        if ends:
            place.episode, place.shown = Episode(), self.look()
            if ends == "truncated":
                rows.final_rows.append(len(rows.rewards))
                finals.append(after)
        rows.rewards.append(step.reward if step else self.rng.random())
        rows.infos.extend((rows.rewards[-1], np.nan))
        rows.terminated.append(ends == "terminated")
        rows.truncated.append(ends == "truncated")
        rows.paused.append(paused)
        told.steps.append(step)
        told.places.append(place)
        told.paused.append(paused)
        return np.full(3, np.inf, np.float32) if paused else place.shown


def _chosen(part: pb.Actions) -> list[tuple[int, Version]]:
    """The actions of one agent, with the weights that chose them."""
    version = Version(part.version.generation, part.version.update)
    return [(int(action), version) for action in CHOSEN.from_tensors(part.actions)]


class Local(Simulator):
    """It acts with policies of the gateway, or with another's."""

    mode = pb.LOCAL_INFERENCE
    info_names = ("recorded",)

    def begin(self) -> None:
        self.version: Version | None = None
        self.asks = False
        super().begin()

    def welcomed(self, welcome: pb.Welcome) -> None:
        super().welcomed(welcome)
        if self.asks:
            self.post(pb.FromSimulator(policy=pb.PolicyRequest()))

    def act(self) -> None:
        if not self.here or len(self.unanswered) >= self.welcome.batches_in_flight:
            return
        local = self.mode == pb.LOCAL_INFERENCE
        if local and not self.asks and (self.version is None or self.rng.random() < 0.2):
            self.asks = True
            self.post(pb.FromSimulator(policy=pb.PolicyRequest()))
        if local and self.version is None:
            return
        number = self.rng.randrange(len(self.places))
        place, count = self.places[number], self.rng.randint(1, 6)
        starts = place.shown is None or self.rng.random() < 0.1
        if starts:
            place.episode.cut = True
            place.episode, place.shown = Episode(), self.look()
        steps = []
        for _ in range(count):
            before, place.shown = place.shown, self.look()
            action = self.rng.choice(np.flatnonzero(self.gateway.legal(before)).tolist())
            step = self.step(place, before, place.shown, action, self.version)
            step.logp = -self.rng.random()
            steps.append(step)
        steps[-1].ends = self.rng.choice(("", "", "terminated", "truncated"))
        shown = [*(step.observation for step in steps), place.shown]
        fields = {
            "environment": number,
            "starts": starts,
            "terminated": steps[-1].ends == "terminated",
            "truncated": bool(steps[-1].ends) and self.rng.random() < 0.3,
            "observations": self.gateway.tensors(shown),
            "actions": CHOSEN.tensors(np.array([step.action for step in steps])),
            "rewards": [step.reward for step in steps],
            "action_logp": [step.logp for step in steps],
        }
        fields["truncated"] |= steps[-1].ends == "truncated"
        if local:
            fields["infos"] = fields["rewards"]
            fields["version"] = pb.PolicyVersion(
                generation=self.version.generation, update=self.version.update
            )
        if steps[-1].ends:
            place.episode, place.shown = Episode(), None
        self.ask("recording", Told(steps, [place], [False]), **fields)

    def happened(self, about: Told) -> None:
        for step in about.steps:
            step.sent = step.may_miss = True  # until it has an answer
        if about.steps[-1].ends and self.mode == pb.LOCAL_INFERENCE:
            self.may_end[about.steps[-1].episode.total] += 1

    def answered(self, about: Told, answer: pb.Recorded) -> None:
        for step in about.steps:
            step.may_miss = answer.stale
        if about.steps[-1].ends and self.mode == pb.LOCAL_INFERENCE:
            self.ended[about.steps[-1].episode.total] += 1

    def hears(self, message: pb.ToSimulator) -> None:
        if message.HasField("policy"):
            version = message.policy.version
            self.version, self.asks = Version(version.generation, version.update), False


class Logged(Local):
    mode = pb.LOGGED_DATA
    info_names = ()
