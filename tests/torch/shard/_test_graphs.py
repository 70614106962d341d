"""Random graphs of operators under random placements: values and gradients equal the dense ones."""
import os
from functools import partial
from random import Random
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
from torch.utils.checkpoint import checkpoint

from hyper_parallel import DeviceMesh, DTensor, Partial, Replicate, Shard, init_device_mesh
from tests.torch.against_dense import Failures, difference, difference_spread, spread
from tests.torch.shard.graphs import Graph, draw_graph, loss_of

NPROC = 4
TIMEOUT = 120
COUNT = int(os.environ.get("GRAPHS", "32"))  # examples on each mesh


def _placements(draw: Random, shape: tuple, mesh: DeviceMesh, summands: bool) -> list:
    kinds = [Replicate(), *map(Shard, range(len(shape))), *map(Shard, range(len(shape))),
             *([Partial()] if summands else [])]
    return [draw.choice(kinds) for _ in range(mesh.ndim)]


class _Pair:
    """A graph on dense and on spread leaves."""

    def __init__(self, mesh: DeviceMesh, draw: Random, length: int) -> None:
        self.graph: Graph = draw_graph(draw, length)
        self.dense = [leaf.detach().clone().requires_grad_(leaf.requires_grad)
                      for leaf in self.graph.leaves]
        self.spread: list[Any] = []
        self.ways: list[Any] = []
        for index, leaf in enumerate(self.dense):
            if draw.random() < 0.15:
                self.spread.append(leaf.detach().clone().requires_grad_(leaf.requires_grad))
                self.ways.append("plain")
                continue
            way = _placements(draw, leaf.shape, mesh, leaf.is_floating_point())
            self.spread.append(spread(leaf, mesh, way, seed=index))
            self.ways.append(way)
        self.moves = {number: _placements(draw, result.shape, mesh, draw.random() < 0.3)
                      for number, result in enumerate(self.graph.results) if draw.random() < 0.25}
        self.watched = [n for n in range(len(self.graph.nodes)) if draw.random() < 0.4]

    def move(self, number: int, result: Any) -> Any:
        """Another layout for some results."""
        if number in self.moves and isinstance(result, DTensor):
            return result.redistribute(placements=self.moves[number])
        return result

    def trained(self) -> list[tuple[Any, Any]]:
        """The leaves that need gradients."""
        return [(s, d) for s, d in zip(self.spread, self.dense) if d.requires_grad]

    def same(self, got: Any, wanted: Any, what: str, wrong: list[str]) -> None:
        """Compare gradients or losses."""
        if wanted is None or got is None:
            if got is not None and _whole(got).any() or wanted is not None and wanted.any():
                wrong.append(f"{what}: {got}, not {wanted}")
            return
        text = difference(_whole(got).detach(), wanted.detach())
        if text:
            wrong.append(f"{what}: {text}")

    def __str__(self) -> str:
        return f"{self.graph}; ways {self.ways}; moves {self.moves}; watched {self.watched}"


def _whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _steps(pair: _Pair, wrong: list[str]) -> None:
    """Two passes that accumulate, an update in place, and a third; values on the way."""
    for step in range(3):
        wanted = pair.graph.run(pair.dense)
        got = pair.graph.run(pair.spread, pair.move)
        if step == 0:
            for number, (one, two) in enumerate(zip(got, wanted)):
                if isinstance(one, DTensor):
                    wrong += [f"result {number}: {text}" for text in difference_spread(one, two)]
                else:
                    pair.same(one, two, f"result {number}", wrong)
        losses = loss_of(got), loss_of(wanted)
        pair.same(*losses, f"loss {step}", wrong)
        for loss in losses:
            if loss.requires_grad:
                loss.backward()
        for index, (one, two) in enumerate(pair.trained()):
            pair.same(one.grad, two.grad, f"gradient {index} in step {step}", wrong)
            if step == 1 and two.grad is not None and one.grad is not None:
                with torch.no_grad():
                    one.sub_(one.grad, alpha=0.01)
                    two.sub_(two.grad, alpha=0.01)
                if index % 2:
                    one.grad = two.grad = None


def _grad(pair: _Pair, wrong: list[str]) -> None:
    """torch.autograd.grad, of a loss and of results with given gradients."""
    trained = pair.trained()
    wanted, got = pair.graph.run(pair.dense), pair.graph.run(pair.spread, pair.move)
    losses = loss_of(wanted), loss_of(got)
    if not losses[0].requires_grad:
        return
    leaves = [dense for _, dense in trained], [one for one, _ in trained]
    outputs = [torch.autograd.grad(loss, list(inputs), allow_unused=True, retain_graph=True)
               for loss, inputs in zip(losses, leaves)]
    for index, (two, one) in enumerate(zip(*outputs)):
        pair.same(one, two, f"grad {index}", wrong)
    for number in sorted(pair.watched):
        pairs = [(got[number], losses[1]), (wanted[number], losses[0])]
        if wanted[number].requires_grad:
            one, two = (torch.autograd.grad(loss, result, allow_unused=True, retain_graph=True)[0]
                        for result, loss in pairs)
            pair.same(one, two, f"grad of result {number}", wrong)
    if wanted[-1].requires_grad:
        weights = torch.arange(1.0, 1 + wanted[-1].numel(), dtype=torch.float64
                               ).reshape(wanted[-1].shape)
        two = torch.autograd.grad(wanted[-1], [d for _, d in trained], weights, allow_unused=True)
        one = torch.autograd.grad(got[-1], [s for s, _ in trained], weights, allow_unused=True)
        for index, pairs in enumerate(zip(one, two)):
            pair.same(*pairs, f"grad of the last {index}", wrong)


def _double(pair: _Pair, wrong: list[str]) -> None:
    """A loss of gradients."""
    trained = pair.trained()
    wanted = loss_of(pair.graph.run(pair.dense))
    if not wanted.requires_grad:
        return
    try:
        first = torch.autograd.grad(wanted, [d for _, d in trained], create_graph=True,
                                    allow_unused=True)
        penalty = sum(g.sin().sum() for g in first if g is not None)
        if penalty.requires_grad:
            penalty.backward()
    except RuntimeError:
        return  # an operator without a second derivative
    got = loss_of(pair.graph.run(pair.spread, pair.move))
    other = torch.autograd.grad(got, [s for s, _ in trained], create_graph=True, allow_unused=True)
    for index, pairs in enumerate(zip(other, first)):
        pair.same(*pairs, f"first {index}", wrong)
    total = sum(g.sin().sum() for g in other if g is not None)
    if penalty.requires_grad:
        pair.same(total, penalty, "penalty", wrong)
        total.backward()
    for index, (one, two) in enumerate(trained):
        pair.same(one.grad, two.grad, f"second {index}", wrong)


def _checkpoint(pair: _Pair, wrong: list[str], reentrant: bool) -> None:
    wanted = loss_of(pair.graph.run(pair.dense))
    got = checkpoint(lambda *leaves: loss_of(pair.graph.run(leaves, pair.move)), *pair.spread,
                     use_reentrant=reentrant)
    pair.same(got, wanted, "loss", wrong)
    if wanted.requires_grad:
        wanted.backward()
        got.backward()
    for index, (one, two) in enumerate(pair.trained()):
        pair.same(one.grad, two.grad, f"gradient {index}", wrong)


class _Watch:
    """Hooks and retained gradients of one side."""

    def __init__(self, pair: _Pair, late: bool) -> None:
        self.pair = pair
        self.late = late
        self.seen: dict[int, Any] = {}
        self.kept: dict[int, Any] = {}
        self.counted: list[bool] = []

    def watch(self, number: int, result: Any) -> None:
        """Retain the gradient of a result, look at it or change it."""
        if not result.requires_grad or number not in self.pair.watched:
            return
        if number % 3 == 0:
            result.retain_grad()
            self.kept[number] = result
        elif number % 3 == 1:
            result.register_hook(lambda grad: self.seen.__setitem__(number, grad))
        else:
            result.register_hook(lambda grad: grad * 2)

    def after(self, number: int, result: Any) -> Any:
        """Move a result, and watch it at once or later."""
        result = self.pair.move(number, result)
        if not self.late:
            self.watch(number, result)
        return result

    def loss(self, leaves: list[Any]) -> Any:
        """The loss, with everything watched."""
        for leaf in leaves:
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(
                    lambda leaf: self.counted.append(leaf.grad is not None))
        results = self.pair.graph.run(leaves, self.after)
        if self.late:
            for number, result in enumerate(results):
                self.watch(number, result)
        return loss_of(results)


def _hooks(pair: _Pair, wrong: list[str], late: bool) -> None:
    """Hooks on results see the whole gradient, and may change it; retained ones likewise."""
    dense, other = _Watch(pair, late), _Watch(pair, late)
    losses = dense.loss(pair.dense), other.loss(pair.spread)
    if not losses[0].requires_grad:
        return
    for loss in losses:
        loss.backward()
    for number, result in dense.kept.items():
        pair.same(other.kept[number].grad, result.grad, f"retained {number}", wrong)
    for number, grad in dense.seen.items():
        pair.same(other.seen.get(number), grad, f"seen {number}", wrong)
    for index, (one, two) in enumerate(pair.trained()):
        pair.same(one.grad, two.grad, f"gradient {index}", wrong)
    if dense.counted != other.counted:
        wrong.append(f"accumulated {other.counted}, not {dense.counted}")


def _autocast(pair: _Pair, wrong: list[str]) -> None:
    """Every result has the dtype that it has without ranks, and about the value."""
    sides = [[leaf.detach().float().requires_grad_() if leaf.is_floating_point() else leaf
              for leaf in leaves] for leaves in (pair.dense, pair.spread)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted, got = pair.graph.run(sides[0]), pair.graph.run(sides[1], pair.move)
        losses = [loss_of(results) for results in (wanted, got)]
    for number, (one, two) in enumerate(zip(got, wanted)):
        _about(one, two, f"result {number}", wrong)
    for loss in losses:
        if loss.requires_grad:
            loss.backward()
    for index, (two, one) in enumerate(zip(*sides)):
        if two.grad is not None:
            _about(one.grad, two.grad, f"gradient {index}", wrong)


def _about(got: Any, wanted: torch.Tensor, what: str, wrong: list[str]) -> None:
    whole = None if got is None else _whole(got).detach()
    if whole is None or whole.dtype != wanted.dtype or whole.shape != wanted.shape:
        wrong.append(f"{what}: {whole}, not {wanted}")
    elif not torch.allclose(whole, wanted.detach(), rtol=0.1,
                            atol=0.1 * (1 + wanted.abs().max().item())):
        wrong.append(f"{what}: {whole.tolist()}, not about {wanted.tolist()}")


_RUN = {"autocast": _autocast, "steps": _steps, "grad": _grad, "double": _double,
        "reentrant": partial(_checkpoint, reentrant=True),
        "not reentrant": partial(_checkpoint, reentrant=False),
        "hooks": partial(_hooks, late=False), "late hooks": partial(_hooks, late=True)}


def _check(pair: _Pair, mode: str) -> None:
    wrong: list[str] = []
    _RUN[mode](pair, wrong)
    assert not wrong, wrong


def _property(mesh: DeviceMesh, count: int) -> None:
    """Every rank draws the same examples first: a failing run must not be repeated by one alone."""
    examples: list[tuple[int, int, str]] = []
    drawing = settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate],
                       suppress_health_check=list(HealthCheck))
    given_graphs = given(st.integers(0, 2 ** 40), st.integers(1, 6), st.sampled_from(sorted(_RUN)))
    seed(int(os.environ.get("GRAPHS_SEED", "7")))(drawing(given_graphs(
        lambda number, length, mode: examples.append((number, length, mode)))))()
    failures = Failures()
    for number, length, mode in examples:
        pair = _Pair(mesh, Random(number), length)
        failures.run(partial(_check, pair, mode), f"{mode} on {mesh.mesh_shape}", str(pair))
    failures.report()


def test_on_a_row_of_four() -> None:
    _property(init_device_mesh((4,), ("x",)), COUNT)


def test_on_a_plane() -> None:
    _property(init_device_mesh((2, 2), ("x", "y")), COUNT)


def test_on_rows_of_two() -> None:
    _property(init_device_mesh((2, 2), ("dp", "tp"))["tp"], COUNT)
