"""Random small graphs of operators, which run alike on dense and on spread tensors.

A graph is drawn by running it on dense tensors: each operator picks its arguments among the
tensors so far, and one that does not fit them is left out. All draws come from one ``Random``, so
that every rank draws the same graph.
"""
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.nn.functional as F

Function = Callable[..., torch.Tensor]
LARGEST = 300  # elements of a tensor
OPERATORS: list[Callable[["Graph"], None]] = []


@dataclass
class Node:
    """An operator: its arguments are numbers of tensors, leaves first and then results."""

    name: str
    function: Function
    arguments: tuple[int, ...]


@dataclass
class Graph:
    """Leaves and operators.

    Attributes:
        draw: where all choices come from.
        leaves: dense leaf tensors.
        tensors: the values of leaves and results while the graph is drawn.
        nodes: the operators; the number of a result is that of the leaves and nodes before it.
    """

    draw: Random
    leaves: list[torch.Tensor] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    results: list[torch.Tensor] = field(default_factory=list)

    def leaf(self, *shape: int) -> int:
        """A new leaf of normal values."""
        generator = torch.Generator().manual_seed(self.draw.randrange(2 ** 30))
        value = torch.randn(shape, dtype=torch.float64, generator=generator)
        self.leaves.append(value.requires_grad_())
        return -len(self.leaves)

    def integers(self, high: int, shape: Sequence[int]) -> int:
        """A new leaf of numbers below ``high``."""
        generator = torch.Generator().manual_seed(self.draw.randrange(2 ** 30))
        self.leaves.append(torch.randint(high, tuple(shape), generator=generator))
        return -len(self.leaves)

    def value(self, number: int) -> torch.Tensor:
        """The dense value of a leaf (negative number) or of a result."""
        return self.leaves[-number - 1] if number < 0 else self.results[number]

    def pick(self, least: int = 0, most: int = 9) -> int:
        """A tensor of so many dims, one of the latest with some preference; a leaf if need be."""
        fitting = [number for number in (*range(-len(self.leaves), 0), *range(len(self.nodes)))
                   if least <= self.value(number).dim() <= most
                   and self.value(number).is_floating_point()]
        if not fitting or self.draw.random() < 0.1:
            ndim = self.draw.randint(max(least, 1), max(1, min(most, 3)))
            return self.leaf(*(self.draw.choice((1, 2, 3, 4, 5, 6)) for _ in range(ndim)))
        return self.draw.choice(fitting[-4:] if self.draw.random() < 0.6 else fitting)

    def add(self, name: str, function: Function, *arguments: int) -> None:
        """Put an operator at the end.

        Raises:
            RuntimeError: it does not fit its arguments, or its result is too large.
        """
        result = function(*map(self.value, arguments))
        if not 0 < result.numel() <= LARGEST or result.dim() > 4 or not result.abs().max() < 1e3:
            raise RuntimeError("the result is too large")
        self.nodes.append(Node(name, function, arguments))
        self.results.append(result.detach())

    def run(self, leaves: Sequence[torch.Tensor],
            after: Callable[[int, torch.Tensor], torch.Tensor] = lambda number, value: value
            ) -> list[torch.Tensor]:
        """The results on other leaves; ``after`` may replace one."""
        results: list[torch.Tensor] = []
        for number, node in enumerate(self.nodes):
            arguments = [leaves[-one - 1] if one < 0 else results[one] for one in node.arguments]
            results.append(after(number, node.function(*arguments)))
        return results

    def __str__(self) -> str:
        leaves = ", ".join(f"{-index - 1}: {tuple(leaf.shape)}"
                           for index, leaf in enumerate(self.leaves))
        return f"leaves {leaves}; " + "; ".join(
            f"{number} = {node.name}{node.arguments} {tuple(self.results[number].shape)}"
            for number, node in enumerate(self.nodes))


def draw_graph(draw: Random, length: int) -> Graph:
    """A graph of ``length`` operators."""
    graph = Graph(draw)
    for _ in range(draw.randint(1, 3)):
        graph.leaf(*(draw.choice((1, 2, 3, 4, 5, 6)) for _ in range(draw.randint(1, 3))))
    tries = 0
    while len(graph.nodes) < length and tries < 50 * length:
        tries += 1
        known = len(graph.leaves)
        try:
            draw.choice(OPERATORS)(graph)
        except (RuntimeError, IndexError, ValueError):
            del graph.leaves[known:]
    return graph


def operator(function: Callable[[Graph], None]) -> Callable[[Graph], None]:
    """Enter a function that adds an operator."""
    OPERATORS.append(function)
    return function


def _dim(graph: Graph, number: int) -> int:
    return graph.draw.randrange(-graph.value(number).dim(), graph.value(number).dim())


UNARY: dict[str, Function] = {
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": torch.relu, "gelu": F.gelu,
    "silu": F.silu, "exp": lambda x: (x.clamp(-3, 2) * 0.5).exp(), "square": lambda x: x ** 2,
    "negative": lambda x: -x, "sin": torch.sin, "absolute": torch.abs, "softplus": F.softplus,
    "affine": lambda x: 0.5 * x + 1.0, "log1p": lambda x: x.abs().log1p(),
    "sqrt": lambda x: (x * x + 1.0).sqrt(), "double": lambda x: x + x, "float": torch.clone,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1), "reciprocal": lambda x: 1 / (1 + x.abs()),
    "fill": lambda x: x.masked_fill(x > 0.5, 0.25), "nan_to_num": torch.nan_to_num,
}
BINARY: dict[str, Function] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "maximum": torch.maximum,
    "minimum": torch.minimum, "quotient": lambda x, y: x / (y.abs() + 1.0),
    "where": lambda x, y: torch.where(x > 0, x, y), "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3), "hypot": lambda x, y: torch.hypot(x + 3, y),
    "add alpha": lambda x, y: torch.add(x, y, alpha=2), "rsub": torch.rsub,
    "squared error": lambda x, y: (x - y).square().mean(),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, y.abs() + 1, value=0.5),
}
REDUCE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.sum, "mean": torch.mean, "amax": torch.amax, "amin": torch.amin,
    "logsumexp": torch.logsumexp,
    "norm": lambda x, *a, **k: torch.linalg.vector_norm(x, 2, *a, **k),
    "max": lambda x, *a, **k: torch.max(x, *a, **k).values, "prod": torch.prod,
    "var": lambda x, *a, **k: torch.var(x, *a, correction=0, **k),
    "std": lambda x, *a, **k: torch.std(x + torch.arange(
        x.shape[a[0]]).reshape(-1, *[1] * (-a[0] - 1)), *a, correction=0, **k),
    "median": lambda x, *a, **k: torch.median(x, *a, **k).values,
}
WHOLE: dict[str, Function] = {
    "sum": torch.sum, "mean": torch.mean, "max": torch.max, "amin": torch.amin, "prod": torch.prod,
    "var": lambda x: torch.var(x, correction=0), "norm": torch.linalg.vector_norm,
    "logsumexp": lambda x: torch.logsumexp(x, tuple(range(x.dim()))), "all dims": lambda x: x.sum(
        tuple(range(x.dim())), keepdim=True),
}


@operator
def _unary(graph: Graph) -> None:
    name = graph.draw.choice(list(UNARY))
    graph.add(name, UNARY[name], graph.pick())


@operator
def _binary(graph: Graph) -> None:
    name = graph.draw.choice(list(BINARY))
    first = graph.pick()
    shape = graph.value(first).shape
    if graph.draw.random() < 0.5:  # one that broadcasts
        keep = graph.draw.randint(0, len(shape))
        second = graph.leaf(*(size if graph.draw.random() < 0.7 else 1
                              for size in shape[len(shape) - keep:]))
    else:
        second = graph.pick()
    pair = (first, second) if graph.draw.random() < 0.7 else (second, first)
    graph.add(name, BINARY[name], *pair)


@operator
def _reduction(graph: Graph) -> None:
    name, number = graph.draw.choice(list(REDUCE)), graph.pick(1)
    dim, keep = _dim(graph, number), graph.draw.random() < 0.5
    if dim >= 0:
        dim -= graph.value(number).dim()
    graph.add(f"{name}({dim}, {keep})", lambda x: REDUCE[name](x, dim, keepdim=keep), number)


@operator
def _whole_reduction(graph: Graph) -> None:
    name = graph.draw.choice(list(WHOLE))
    graph.add(f"{name}()", WHOLE[name], graph.pick(1))


@operator
def _matmul(graph: Graph) -> None:
    number = graph.pick(1, 3)
    inner, out = graph.value(number).shape[-1], graph.draw.choice((1, 2, 3, 5))
    kind = graph.draw.choice(("matmul", "linear", "bias", "vector", "einsum", "addmm", "bmm",
                              "tensordot", "outer", "dot", "baddbmm", "left"))
    ndim = graph.value(number).dim()
    if kind in ("matmul", "tensordot", "einsum"):
        graph.add(kind, {"matmul": torch.matmul,
                         "tensordot": lambda x, w: torch.tensordot(x, w, ([-1], [0])),
                         "einsum": lambda x, w: torch.einsum("...i,io->...o", x, w)}[kind],
                  number, graph.leaf(inner, out))
    elif kind == "left":
        graph.add(kind, lambda x, w: w @ x, number, graph.leaf(out, graph.value(number).shape[-2]))
    elif kind in ("linear", "bias"):
        bias = (graph.leaf(out),) if kind == "bias" else ()
        graph.add(kind, F.linear, number, graph.leaf(out, inner), *bias)
    elif kind == "vector":
        graph.add(kind, torch.matmul, number, graph.leaf(inner))
    elif kind == "addmm" and ndim == 2:
        graph.add(kind, torch.addmm, graph.leaf(out), number, graph.leaf(inner, out))
    elif kind in ("bmm", "baddbmm") and ndim == 3:
        batch, rows, _ = graph.value(number).shape
        if kind == "bmm":
            graph.add(kind, torch.bmm, number, graph.leaf(batch, inner, out))
        else:
            graph.add(kind, torch.baddbmm, graph.leaf(1, rows, out), number,
                      graph.leaf(batch, inner, out))
    elif kind in ("outer", "dot") and ndim == 1:
        graph.add(kind, getattr(torch, kind), number, graph.leaf(inner if kind == "dot" else out))


@operator
def _pairs(graph: Graph) -> None:
    """Products of a tensor with one like it, as in attention."""
    number = graph.pick(2, 3)
    other = graph.leaf(*graph.value(number).shape)
    text = graph.draw.choice(("...ij,...kj->...ik", "...ij,...ij->...i", "...ij,...ik->...jk",
                              "...ij,...ij->..."))
    graph.add(f"einsum {text}", lambda x, y: torch.einsum(text, x, y), number, other)


@operator
def _softmax(graph: Graph) -> None:
    number = graph.pick(1)
    dim = _dim(graph, number)
    kind = graph.draw.choice((torch.softmax, torch.log_softmax, F.softmin, torch.cumsum,
                              torch.logcumsumexp, F.normalize, F.glu))
    graph.add(kind.__name__, lambda x: kind(x, dim=dim), number)


@operator
def _norm(graph: Graph) -> None:
    number = graph.pick(1)
    shape = graph.value(number).shape
    last = graph.draw.randint(1, len(shape))
    size = tuple(shape[-last:])
    kind = graph.draw.choice(("layer", "rms", "plain", "group"))
    if kind == "layer":
        graph.add(f"layer_norm{size}", lambda x, w, b: F.layer_norm(x, size, w, b, eps=0.1),
                  number, graph.leaf(*size), graph.leaf(*size))
    elif kind == "rms":
        graph.add(f"rms_norm{size}", lambda x, w: F.rms_norm(x, size, w, eps=0.1), number,
                  graph.leaf(*size))
    elif kind == "plain":
        graph.add(f"layer_norm{size}", lambda x: F.layer_norm(x, size, eps=0.1), number)
    elif len(shape) >= 2:
        groups = graph.draw.choice([n for n in (1, 2, 3) if shape[1] % n == 0])
        graph.add(f"group_norm({groups})", lambda x, w: F.group_norm(x, groups, w, eps=0.1),
                  number, graph.leaf(shape[1]))


@operator
def _view(graph: Graph) -> None:
    number = graph.pick(1)
    draw, shape = graph.draw, graph.value(number).shape
    dim, ndim = _dim(graph, number), len(shape)
    size = shape[dim]
    start = draw.randrange(size)
    length = draw.randint(1, size - start)
    order = draw.sample(range(ndim), ndim)
    factors = [n for n in range(1, size + 1) if size % n == 0]
    factor = draw.choice(factors)
    options: dict[str, Function] = {
        f"permute{order}": lambda x: x.permute(order),
        f"transpose({dim})": lambda x: x.transpose(dim, 0),
        f"movedim({dim})": lambda x: x.movedim(dim, -1),
        "flatten": lambda x: x.flatten(), "reshape": lambda x: x.reshape(-1),
        "ravel rows": lambda x: x.reshape(-1, shape[-1]),
        "view rows": lambda x: x.view(shape[0], -1),
        f"unflatten({dim}, {factor})": lambda x: x.unflatten(dim, (factor, size // factor)),
        f"unsqueeze({dim})": lambda x: x.unsqueeze(dim), "squeeze": lambda x: x.squeeze(),
        "expand": lambda x: x[None].expand(2, *[-1] * ndim),
        f"narrow({dim}, {start}, {length})": lambda x: x.narrow(dim, start, length),
        f"select({dim}, {start})": lambda x: x.select(dim, start),
        f"[{start}]": lambda x: x[start % shape[0]],
        f"step({dim})": lambda x: x.movedim(dim, 0)[::2],
        f"[..., {start}:]": lambda x: x[..., start % shape[-1]:],
        f"chunk({dim})": lambda x: x.chunk(2, dim)[-1], f"split({dim})": lambda x: x.split(
            length, dim)[0], f"unbind({dim})": lambda x: x.unbind(dim)[start],
        f"tensor_split({dim})": lambda x: x.tensor_split(2, dim)[-1],
        f"flip({dim})": lambda x: x.flip(dim), f"roll({dim})": lambda x: x.roll(1, dim),
        "repeat": lambda x: x.repeat(2, *[1] * (ndim - 1)), "tile": lambda x: x.tile((2,)),
        f"repeat_interleave({dim})": lambda x: x.repeat_interleave(2, dim),
        "pad": lambda x: F.pad(x, (1, 2)), "diagonal": lambda x: x.diagonal(0, 0, -1),
        "tril": lambda x: x.tril(), "none": lambda x: x[None, ..., None], "t": lambda x: x.mT,
        "contiguous": lambda x: x.transpose(0, -1).contiguous(),
    }
    name = draw.choice(list(options))
    graph.add(name, options[name], number)


@operator
def _index(graph: Graph) -> None:
    number = graph.pick(1)
    draw, shape = graph.draw, graph.value(number).shape
    dim = _dim(graph, number)
    kind = draw.choice(("index_select", "gather", "advanced", "embedding", "take", "mask", "rows",
                        "scatter_add", "index_add", "two"))
    if kind in ("index_select", "rows", "index_add"):
        index = graph.integers(shape[dim], (draw.randint(1, 5),))
        if kind == "index_add":
            more = [*shape[:dim], graph.value(index).numel(), *shape[dim:][1:]]
            graph.add(f"{kind}({dim})", lambda x, i, s: x.index_add(dim, i, s), number, index,
                      graph.leaf(*more))
        else:
            graph.add(f"{kind}({dim})", (lambda x, i: x.index_select(dim, i))
                      if kind == "index_select" else (lambda x, i: x.movedim(dim, 0)[i]),
                      number, index)
    elif kind in ("gather", "take", "scatter_add"):
        index = graph.integers(shape[dim], shape)
        graph.add(f"{kind}({dim})", {
            "gather": lambda x, i: x.gather(dim, i),
            "take": lambda x, i: torch.take_along_dim(x, i, dim),
            "scatter_add": lambda x, i: x.scatter_add(dim, i, x.tanh())}[kind], number, index)
    elif kind == "embedding":
        weight = graph.leaf(draw.choice((3, 5, 7)), draw.choice((2, 3)))
        index = graph.integers(graph.value(weight).shape[0], (draw.randint(1, 4), 3))
        graph.add(kind, F.embedding, index, weight)
    elif kind == "advanced":
        index = graph.integers(shape[-1], (2, 2))
        graph.add(kind, lambda x, i: x[..., i], number, index)
    elif kind == "two" and len(shape) > 1:
        graph.add(kind, lambda x, i, j: x[i, j], number, graph.integers(shape[0], (4,)),
                  graph.integers(shape[1], (4,)))
    elif kind == "mask":
        graph.add(kind, lambda x, i: x.masked_fill(i.bool(), 0.0), number,
                  graph.integers(2, shape))


@operator
def _join(graph: Graph) -> None:
    number = graph.pick(1)
    dim, shape = _dim(graph, number), list(graph.value(number).shape)
    if graph.draw.random() < 0.5:
        graph.add(f"stack({dim})", lambda x, y: torch.stack((x, y, x), dim), number,
                  graph.leaf(*shape))
    else:
        shape[dim] = graph.draw.choice((1, 2, 3))
        graph.add(f"cat({dim})", lambda x, y: torch.cat((x, y), dim), number, graph.leaf(*shape))


@operator
def _convolution(graph: Graph) -> None:
    number = graph.pick(3, 4)
    shape = graph.value(number).shape
    kernel = [min(2, size) for size in shape[2:]]
    function = F.conv1d if len(shape) == 3 else F.conv2d
    out = graph.draw.choice((1, 2, 4))
    graph.add(function.__name__, function, number, graph.leaf(out, shape[1], *kernel),
              graph.leaf(out))


@operator
def _attention(graph: Graph) -> None:
    heads, length, width = (graph.draw.choice(sizes) for sizes in ((2, 4), (3, 5), (2, 3)))
    batch = graph.draw.choice((1, 2, 3))
    causal = graph.draw.random() < 0.5
    query = graph.leaf(batch, heads, length, width)
    key, value = (graph.leaf(batch, heads, length, width) for _ in range(2))
    graph.add(f"sdpa({causal})", lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, is_causal=causal), query, key, value)


@operator
def _loss(graph: Graph) -> None:
    number = graph.pick(2, 2)
    rows, classes = graph.value(number).shape
    reduction = graph.draw.choice(("mean", "sum", "none"))
    kind = graph.draw.choice(("cross_entropy", "nll", "weights", "logits", "smoothed", "huber"))
    if kind in ("logits", "huber"):
        function = F.huber_loss if kind == "huber" else \
            lambda x, y, reduction: F.binary_cross_entropy_with_logits(x, y.sigmoid(), None, None,
                                                                       None, reduction)
        graph.add(kind, lambda x, y: function(x, y, reduction=reduction), number,
                  graph.leaf(rows, classes))
        return
    target = graph.integers(classes, (rows,))
    if kind == "weights":
        graph.add(f"{kind} {reduction}", lambda x, t, w: F.cross_entropy(
            x, t, w.abs() + 0.5, ignore_index=0, reduction=reduction), number, target,
            graph.leaf(classes))
    else:
        functions = {"cross_entropy": lambda x, t: F.cross_entropy(x, t, reduction=reduction),
                     "nll": lambda x, t: F.nll_loss(x.log_softmax(-1), t, reduction=reduction),
                     "smoothed": lambda x, t: F.cross_entropy(x, t, label_smoothing=0.2,
                                                              reduction=reduction)}
        graph.add(f"{kind} {reduction}", functions[kind], number, target)


def _written(function: Callable[..., Any]) -> Function:
    """Writes in place to a copy."""
    def run(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        copy = x * 1.0
        function(copy, *others)
        return copy

    return run


@operator
def _in_place(graph: Graph) -> None:
    number = graph.pick(1)
    shape = graph.value(number).shape
    other = graph.leaf(*(shape[graph.draw.randint(0, len(shape) - 1):]))
    row = graph.leaf(*shape[1:])
    options: dict[str, tuple] = {
        "add_": (lambda x, y: x.add_(y), other), "mul_": (lambda x, y: x.mul_(y), other),
        "tanh_": (lambda x: x.tanh_(),), "clamp_": (lambda x: x.clamp_(-0.5, 0.5),),
        "masked_fill_": (lambda x, y: x.masked_fill_(y > 0, 0.5), other),
        "copy_": (lambda x, y: x.copy_(y.sin()), other), "zero_": (lambda x: x.zero_(),),
        "x[0] =": (lambda x, y: x.__setitem__(0, y), row),
        "x[1:] =": (lambda x, y: x.__setitem__(slice(1, None), y), row),
        "x[...] =": (lambda x: x.__setitem__((..., 0), 0.5),),
        "x[mask] =": (lambda x: x.__setitem__(x > 0.3, 0.1),),
        "sub_ alpha": (lambda x, y: x.sub_(y, alpha=0.5), other),
        "iadd": (lambda x, y: x.__iadd__(y), other), "div_": (lambda x, y: x.div_(
            y.abs() + 1), other), "addcmul_": (lambda x, y: x.addcmul_(y, y), other),
    }
    name = graph.draw.choice(list(options))
    function, *arguments = options[name]
    graph.add(name, _written(function), number, *arguments)


def loss_of(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number to which the last results and some before contribute, each in its own way."""
    total = results[-1].sum() * 0.0
    for index, result in enumerate(results[-3:] + results[:2]):
        total = total + (result * math.cos(index)).sum() + result.sin().mean()
    return total
