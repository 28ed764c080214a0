"""The colours of the page: seen on their ground, and told apart by people with colour blindness."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from juggler.driver.watching import serving as app

Colour = NDArray[np.float64]  # red, green and blue, linear, from 0 to 1

#: How colours look without one kind of cones: Machado et al., "A Physiologically-based
#: Model for Simulation of Color Vision Deficiency" (2009), at full strength.
SEEN = {
    "as they are": np.eye(3),
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deuteranopia": [
        [0.3673, 0.8606, -0.2280],
        [0.2801, 0.6725, 0.0474],
        [-0.0118, 0.0429, 0.9689],
    ],
    "tritanopia": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}
_XYZ = np.array([[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]])
#: CIE 1976: below some 2.3 nobody sees a difference.
_TOLD_APART = 12.0
_GRAPHICS, _TEXT = 3.0, 4.5  # contrasts that WCAG 2.2 asks for


def colours(theme: str) -> dict[str, Colour]:
    light, _, dark = (
        (Path(app.__file__).parent / "page" / "page.css").read_text().partition("@media")
    )
    text = light if theme == "light" else light + dark.partition("}\n}")[0]
    return {name: linear(code) for name, code in re.findall(r"--(\w+): #([0-9a-f]+);", text)}


def linear(code: str) -> Colour:
    whole = code if len(code) == 6 else "".join(2 * digit for digit in code)
    parts = np.array([int(whole[i : i + 2], 16) / 255 for i in (0, 2, 4)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(colour: Colour) -> Colour:
    x, y, z = _XYZ @ np.clip(colour, 0.0, 1.0) / [0.9505, 1.0, 1.0888]
    f = [np.cbrt(v) if v > (6 / 29) ** 3 else v / (3 * (6 / 29) ** 2) + 4 / 29 for v in (x, y, z)]
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: Colour, other: Colour) -> float:
    low, high = sorted(float(_XYZ[1] @ each) for each in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_curves_are_told_apart_with_any_kind_of_colour_blindness(theme: str) -> None:
    curves = {name: colour for name, colour in colours(theme).items() if re.fullmatch(r"c\d", name)}
    assert len(curves) == 7
    for kind, matrix in SEEN.items():
        for one, other in combinations(curves, 2):
            places = [lab(np.asarray(matrix) @ curves[name]) for name in (one, other)]
            assert np.linalg.norm(places[0] - places[1]) > _TOLD_APART, (one, other, kind)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_curves_and_words_are_seen_on_their_ground(theme: str) -> None:
    found = colours(theme)
    for name in found.keys() - {"ground", "panel", "line", "win", "lose"}:
        least = _GRAPHICS if re.fullmatch(r"c\d", name) else _TEXT
        assert contrast(found[name], found["panel"]) > least, name
