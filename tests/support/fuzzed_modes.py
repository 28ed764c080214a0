"""Simulators of the three modes, doing all that they may."""

from __future__ import annotations

from typing import Any

import numpy as np

from juggler.client.spaces import Values
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.v1 import simulator_pb2 as pb
from support.fuzzed_books import Episode, Step
from support.fuzzed_simulators import Place, Simulator, Told
from support.fuzzed_world import MOST_UPDATES
from support.gateway_world import TWO_WAYS

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
        """One row: the step, how the episode ended with it, whether none comes, its final
        observation, and what is to be acted on."""
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
        """The environments in which everybody who takes part ends now."""
        running = {n for n, place in enumerate(self.places) if place.runs}
        return {n // self.agents for n in ended} - {n // self.agents for n in running - ended}

    def _add(
        self, rows: pb.Rows, n: int, ends: str, over: set[int], told: Told, finals: list[Any]
    ) -> Any:
        """One row of an agent -> what it shows. The last observations of those who are truncated
        go to `finals`."""
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
    """It acts with policies of the gateway, or somebody else did."""

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
