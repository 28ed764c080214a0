from __future__ import annotations

from support.gateway_world import nobody_stalls

__all__ = ["nobody_stalls"]  # for every test here
