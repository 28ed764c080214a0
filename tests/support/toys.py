"""Small, cheap environments, each with one demand on a module."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Infos = dict[str, Any]
Step = tuple[Any, float, bool, bool, Infos]
Floats = NDArray[np.float32]


class TMaze(gymnasium.Env[Floats, int]):
    """A corridor whose first sign shows where to turn.

    Observations: the sign (-1 or 1; 0 from the second step on), and whether this is the end.
    Actions: 0 walks, 1 and 2 turn. Turning in the corridor costs 0.1, and so does walking at its
    end; the right turn there is worth 1, the wrong one -1. Without memory, the best return is 0.
    """

    def __init__(self, length: int) -> None:
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Discrete(3)
        self._length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Floats, Infos]:
        super().reset(seed=seed)
        self._at = self._steps = 0
        self._sign = int(self.np_random.integers(2)) * 2 - 1
        return np.array([self._sign, 0], np.float32), {}

    def step(self, action: int) -> Step:
        self._steps += 1
        at_end = self._at == self._length
        turned = at_end and action != 0
        if turned:
            reward = float(self._sign * (1 if action == 2 else -1))
        else:
            reward = 0.0 if (action == 0) != at_end else -0.1
            self._at += action == 0 and not at_end
        seen = np.array([0, self._at == self._length], np.float32)
        return seen, reward, turned, self._steps == 4 * self._length, {}


class Dials(gymnasium.Env[NDArray[np.int64], NDArray[np.int64]]):
    """Three dials, each to be set one further than shown.

    An episode has 20 steps, and is worth 20; chance is 5.2.
    """

    SIZES = np.array([3, 4, 5])

    def __init__(self) -> None:
        self.observation_space = spaces.MultiDiscrete(self.SIZES)
        self.action_space = spaces.MultiDiscrete(self.SIZES)

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[NDArray[np.int64], Infos]:
        super().reset(seed=seed)
        self._steps = 0
        return self._show(), {}

    def step(self, action: NDArray[np.int64]) -> Step:
        self._steps += 1
        right = np.count_nonzero(action == (self._shown + 1) % self.SIZES)
        return self._show(), right / len(self.SIZES), False, self._steps == 20, {}

    def _show(self) -> NDArray[np.int64]:
        self._shown = self.np_random.integers(self.SIZES)  # [3]
        return self._shown


class Lamps(gymnasium.Env[NDArray[np.int8], NDArray[np.int8]]):
    """Six lamps, each to be set by its two neighbours.

    That is 1 where one of the two that are shown is on and the other is not; the reward is the
    share set right. An episode has 20 steps, and is worth 20; chance is 10.
    """

    COUNT = 6

    def __init__(self) -> None:
        self.observation_space = spaces.MultiBinary(self.COUNT)
        self.action_space = spaces.MultiBinary(self.COUNT)

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[NDArray[np.int8], Infos]:
        super().reset(seed=seed)
        self._steps = 0
        return self._show(), {}

    def step(self, action: NDArray[np.int8]) -> Step:
        self._steps += 1
        asked = np.roll(self._shown, 1) ^ np.roll(self._shown, -1)  # [6]
        right = np.count_nonzero(action == asked)
        return self._show(), right / self.COUNT, False, self._steps == 20, {}

    def _show(self) -> NDArray[np.int8]:
        self._shown = self.np_random.integers(2, size=self.COUNT, dtype=np.int8)  # [6]
        return self._shown


class Errand(gymnasium.Env[dict[str, Any], int]):
    """A walk to a corner of 25 fields, with reversed controls perhaps.

    Every part of the observation has to be read: where one is (a Box), which corner (a Discrete,
    one level down), whether the controls are reversed (a MultiBinary). A step costs 0.05, and each
    one nearer is worth 0.25: 0.8 at best.

    Args:
        nested: false: all three side by side, for libraries that know no Dict within a Dict.
    """

    MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1))
    CORNERS = ((-2, -2), (-2, 2), (2, -2), (2, 2))

    def __init__(self, nested: bool = True) -> None:
        at = spaces.Box(-2, 2, (2,), np.float32)
        order = {"corner": spaces.Discrete(4), "reversed": spaces.MultiBinary(1)}
        self._nested = nested
        self.observation_space = spaces.Dict(
            {"at": at, "order": spaces.Dict(order)} if nested else {"at": at, **order}
        )
        self.action_space = spaces.Discrete(4)

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[dict[str, Any], Infos]:
        super().reset(seed=seed)
        self._x = self._y = self._steps = 0
        self._corner, self._reversed = self.np_random.integers((4, 2)).tolist()
        self._order = {
            "corner": np.int64(self._corner),
            "reversed": np.array([self._reversed], np.int8),
        }
        return self._seen(), {}

    def step(self, action: int) -> Step:
        self._steps += 1
        dx, dy = self.MOVES[action]
        way = -1 if self._reversed else 1
        before = self._distance()
        self._x = min(2, max(-2, self._x + way * dx))
        self._y = min(2, max(-2, self._y + way * dy))
        left = self._distance()
        reward = (before - left) / 4 - 0.05
        return self._seen(), reward, left == 0, self._steps == 20, {}

    def _distance(self) -> int:
        x, y = self.CORNERS[self._corner]
        return abs(x - self._x) + abs(y - self._y)

    def _seen(self) -> dict[str, Any]:
        at = np.array([self._x, self._y], np.float32)  # [2]
        return {"at": at, "order": self._order} if self._nested else {"at": at, **self._order}


class NextFree(gymnasium.Env[Any, int]):
    """The first free place from a number on, of 8.

    The number is all that a module sees, the mask says what is free. An episode has 20 steps, and
    is worth 20; a random free place is the right one in about every fourth step.

    Args:
        mask_in: "observation" or "info".
    """

    PLACES = 8

    def __init__(self, mask_in: str) -> None:
        plain = spaces.Discrete(self.PLACES)
        mask = spaces.MultiBinary(self.PLACES)
        self._in_info = mask_in == "info"
        self.observation_space = (
            plain if self._in_info else spaces.Dict({"number": plain, "action_mask": mask})
        )
        self.action_space = spaces.Discrete(self.PLACES)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Infos]:
        super().reset(seed=seed)
        self._steps = 0
        return self._next()

    def step(self, action: int) -> Step:
        if not self._free[action]:
            raise ValueError(f"place {action} is not free: {self._free}")
        self._steps += 1
        best = next(
            place
            for place in ((self._number + i) % self.PLACES for i in range(self.PLACES))
            if self._free[place]
        )
        observation, info = self._next()
        return observation, float(action == best), False, self._steps == 20, info

    def _next(self) -> tuple[Any, Infos]:
        self._number = int(self.np_random.integers(self.PLACES))
        bits = int(self.np_random.integers(1, 2**self.PLACES))  # at least one is free
        self._free = np.array([bits >> i & 1 for i in range(self.PLACES)], np.int8)  # [8]
        if self._in_info:
            return np.int64(self._number), {"action_mask": self._free}
        return {"number": np.int64(self._number), "action_mask": self._free}, {}


class BadlyScaled(gymnasium.Env[Floats, Floats]):
    """Two numbers to repeat: around 2000, and in thousandths.

    An episode has 20 steps, and is worth 20 less the distances; 0 in every step is worth 0.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Floats, Infos]:
        super().reset(seed=seed)
        self._steps = 0
        return self._show(), {}

    def step(self, action: Floats) -> Step:
        self._steps += 1
        error = float(np.square(action - self._numbers).mean())
        # The mean square of numbers between -1 and 1 is 1/3.
        return self._show(), 1 - 3 * error, False, self._steps == 20, {}

    def _show(self) -> Floats:
        self._numbers = self.np_random.uniform(-1, 1, 2)  # [2]
        return (self._numbers * (5, 1e-3) + (2000, 0)).astype(np.float32)


class Valve(gymnasium.Env[Floats, Floats]):
    """A valve between 5 and 9, best near 7 as observed.

    An episode has 20 steps. The right setting in every step is worth 20, always 5 is worth -20.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = spaces.Box(5, 9, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Floats, Infos]:
        super().reset(seed=seed)
        self._steps = 0
        return self._show(), {}

    def step(self, action: Floats) -> Step:
        reward = 1 - abs(float(action[0]) - self._right)
        self._steps += 1
        return self._show(), reward, False, self._steps == 20, {}

    def _show(self) -> Floats:
        seen = self.np_random.uniform(-1, 1, 1).astype(np.float32)  # [1]
        self._right = 7 + 0.5 * float(seen[0])
        return seen


class Catch(gymnasium.Env[NDArray[np.uint8], int]):
    """A dot falls through an image; the bat catches it or not."""

    SIDE = 10

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (self.SIDE, self.SIDE, 1), np.uint8)
        self.action_space = spaces.Discrete(3)

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[NDArray[np.uint8], Infos]:
        super().reset(seed=seed)
        self._row, self._bat = 0, self.SIDE // 2
        self._column = int(self.np_random.integers(self.SIDE))
        return self._image(), {}

    def step(self, action: int) -> Step:
        self._bat = min(self.SIDE - 1, max(0, self._bat + int(action) - 1))
        self._row += 1
        over = self._row == self.SIDE - 1
        caught = 1.0 if self._bat == self._column else -1.0
        return self._image(), caught if over else 0.0, over, False, {}

    def _image(self) -> NDArray[np.uint8]:
        image = np.zeros((self.SIDE, self.SIDE, 1), np.uint8)  # [H, W, C]
        image[self._row, self._column] = image[-1, self._bat] = 255
        return image
