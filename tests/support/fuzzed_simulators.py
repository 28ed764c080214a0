"""Simulators that do whatever they may, and remember it; and that go wild."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any, NamedTuple

import numpy as np

from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import simulator_pb2 as pb
from support.fuzzed_books import Episode, Step
from support.fuzzed_world import RESUME_SECONDS, FuzzedGateway, Stream
from support.gateway_world import hello


class Told(NamedTuple):
    """What a message says: of some environments, a step of each or None, or several of one.

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
        wild: it has sent damaged messages: whatever it gets is right.
        ended: returns and lengths of episodes that the gateway knows the end of.
        may_end: and of those that it may know the end of.
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
        """The connection breaks: what is on its way, either way, may be lost."""
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
    """The gateway gets at once all that is on its way, and answers.

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
