"""Tables of a configuration with a dataclass of their own: what is wrong in one is told."""

from __future__ import annotations

from typing import Any

import pytest

from juggler.learner.around_config import IntrinsicConfig


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"coeficient": 1.0}, "intrinsic has no key 'coeficient': did you mean 'coefficient'"),
        ({"kind": "rdn"}, r"intrinsic.kind: 'rdn' is not known: did you mean 'rnd'\?"),
        ({"coefficient": "much"}, 'intrinsic.coefficient: expected a number, not "much"'),
    ],
)
def test_what_is_wrong_in_a_table_is_told(table: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        IntrinsicConfig.parse(table)
