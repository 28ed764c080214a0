"""Training passes in bfloat16, and compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.batches import TWO, VECTOR, MakeBatch
from support.small_cores import copied

from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.core.population import Population
from juggler.learner.data.collate import collate
from juggler.learner.learner import Learner
from juggler.learner.optim.flat_module import TrainingPass
from juggler.runtime.modules.module_specs import build_module


def make_core(model: dict[str, Any] | None = None, **config: Any) -> Impala:
    make = partial(build_module, None, VECTOR, TWO, {"hidden_sizes": [16], **(model or {})})
    return Impala(make, ImpalaConfig(**config))


@pytest.mark.parametrize("recurrent", ["none", "lstm", "gru"])
def test_a_pass_in_bfloat16_returns_float32_near_to_that_of_float32(recurrent: str) -> None:
    core = make_core({"recurrent": recurrent, "recurrent_size": 8})
    module, state = core.module, core.init(0)
    tensors = {**core.flat.named(state["parameters"]), **state["buffers"]}
    shape = (32, 4) if recurrent == "none" else (32, 5, 4)
    batch: dict[str, Any] = {"observations": torch.randn(shape)}
    if initial := module.get_initial_state():
        batch["states"] = {
            key: {name: x.expand(32, -1) for name, x in each.items()}
            if isinstance(each, dict)
            else each.expand(32, -1)
            for key, each in initial.items()
        }
    exact = TrainingPass(module)(tensors, batch)
    found = TrainingPass(module, bfloat16=True)(tensors, batch)
    assert found.keys() == exact.keys()
    for name in ("action_dist_inputs", "values"):
        assert found[name].dtype == torch.float32
        assert not torch.equal(found[name], exact[name])  # it was computed in fewer bits
        torch.testing.assert_close(found[name], exact[name], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("recurrent", ["none", "lstm"])
def test_gradients_in_bfloat16_point_where_those_of_float32_do(
    make_batch: MakeBatch, recurrent: str
) -> None:
    model = {"recurrent": recurrent, "recurrent_size": 8}
    exact, core = make_core(model), make_core(model, precision="bfloat16")
    state = core.init(0)
    states: dict[str, Any] = {}
    if initial := core.initial_state():
        states["module"] = _rows(initial, 8)
    sample = collate([make_batch(8, 16, states=states)])
    (one, _), (other, aux) = exact.grads(state, sample), core.grads(state, sample)
    assert other.dtype == torch.float32
    assert not torch.equal(one, other)
    assert torch.cosine_similarity(one, other, dim=0) > 0.99
    after = core.apply(copied(state), other, aux).state
    assert after["parameters"].dtype == after["moments"]["mean"].dtype == torch.float32


def _rows(tree: Any, rows: int) -> Any:
    if isinstance(tree, dict):
        return {key: _rows(each, rows) for key, each in tree.items()}
    return tree.expand(rows, *tree.shape).detach().numpy().copy()


@pytest.mark.slow
def test_a_compiled_pass_is_used_and_learns_the_same_from_however_many_rows(
    make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What turns graphs into machine code takes long; tests/system has it too.
    backends = {"inductor": "eager"}
    lookup = torch._dynamo.lookup_backend
    monkeypatch.setattr(
        torch._dynamo, "lookup_backend", lambda name: lookup(backends.get(name, name))
    )
    compiled, plain = Learner(make_core(compile=True)), Learner(make_core())
    calls, before = [], torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for seed, rows in enumerate((4, 5, 7)):
        batch = make_batch(rows, 6, seed=seed)
        found = fetch_metrics(compiled.update_from_episodes([batch]))
        expected = fetch_metrics(plain.update_from_episodes([batch]))
        calls.append(found.pop("compiled_calls"))
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert calls[0] == 0  # the first pass is not compiled
    assert min(calls[1:]) >= 1  # a graph was run in every other update
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert graphs <= calls[1]  # and the same one for another number of rows
    assert compiled.core._pass.compiled_calls == sum(calls)
    for name, x in plain.get_params().items():
        torch.testing.assert_close(compiled.get_params()[name], x, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_population_is_not_compiled() -> None:
    with pytest.raises(ValueError, match="compile = true: nothing is"):
        Population(make_core(compile=True), size=2)


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    # It takes seconds to import, and only where something is compiled.
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def no_compiler() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", no_compiler)
    with pytest.raises(ValueError, match=r"compile = true: torch.compile"):
        make_core(compile=True)
