"""No module of the package imports itself by way of others."""

from __future__ import annotations

import grimp


def test_imports_go_in_no_circle() -> None:
    """Neither at the head of a module, nor for types alone, nor within functions."""
    # Not from a cache on disk, which would be left where the tests are run.
    graph = grimp.build_graph("juggler", cache_dir=None)
    # What imports nothing that is left is in no circle: without it, nothing is left but circles.
    left = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    while outermost := [module for module, imports in left.items() if not imports & left.keys()]:
        for module in outermost:
            del left[module]
    assert not left, "\n".join(_circle(left))


def _circle(imports: dict[str, set[str]]) -> list[str]:
    """A circle among modules each of which imports another one of them."""
    path = [min(imports)]
    while True:
        following = min(imports[path[-1]] & imports.keys())
        if following in path:
            return [*path[path.index(following) :], following]
        path.append(following)
