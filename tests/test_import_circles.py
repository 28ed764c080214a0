"""No module of the package imports itself by way of others."""

from __future__ import annotations

import grimp

#: Through the objects of these modules, the parts of a run and of its league reach each other.
OWNERS = {"juggler.driver.run_parts", "juggler.driver.workers.league_run"}


def test_imports_go_in_no_circle() -> None:
    """Imports form no circle: at heads, for types, or in functions.

    The exception is the types of owners, by which their parts are annotated.
    """
    # Not from a cache on disk, which would be left where the tests are run.
    graph = grimp.build_graph("juggler", cache_dir=None)
    run = grimp.build_graph("juggler", cache_dir=None, exclude_type_checking_imports=True)
    # What imports nothing that is left is in no circle: without it, nothing is left but circles.
    left = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    for module, imports in left.items():
        imports -= OWNERS - run.find_modules_directly_imported_by(module)
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
