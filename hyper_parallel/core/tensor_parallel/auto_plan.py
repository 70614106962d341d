"""``auto_plan``: styles for layers that stand together as in the usual models.

It looks at names and sizes alone.  A *family* is a group of layers that one all-reduce serves: the
columns take the same input and are split by outputs, the row takes what they give and is split by
inputs.  Everything else stays whole on every rank, and the printed plan says so.
"""
from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, Iterator, NamedTuple, Optional

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.placement_types import Replicate
from hyper_parallel.core.tensor_parallel._heads import head_length
from hyper_parallel.core.tensor_parallel._record import brief_style
from hyper_parallel.core.tensor_parallel.style import (
    ColwiseParallel, ParallelStyle, RowwiseParallel)
from hyper_parallel.platform import get_platform

platform = get_platform()


class _Family(NamedTuple):
    """Paths within the module that holds the layers; the rows are the names that there are."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]


_FAMILIES = (
    # attention
    _Family(("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj", "dense")),
    _Family(("query", "key", "value"), ("out_proj", "o_proj", "dense")),
    _Family(("self.query", "self.key", "self.value"), ("output.dense",)),
    _Family(("attention.query", "attention.key", "attention.value"), ("output.dense",)),
    _Family(("wq", "wk", "wv"), ("wo",)),
    _Family(("q_lin", "k_lin", "v_lin"), ("out_lin",)),
    _Family(("to_q", "to_k", "to_v"), ("to_out.0", "to_out")),
    _Family(("q", "k", "v"), ("o", "out", "proj")),
    _Family(("c_attn",), ("c_proj",)),
    # feed-forward
    _Family(("gate_proj", "up_proj"), ("down_proj",)),
    _Family(("up_proj",), ("down_proj",)),
    _Family(("w1", "w3"), ("w2",)),
    _Family(("fc1",), ("fc2",)),
    _Family(("c_fc",), ("c_proj",)),
    _Family(("fc_in",), ("fc_out",)),
    _Family(("linear1",), ("linear2",)),
    _Family(("lin1",), ("lin2",)),
    _Family(("wi_0", "wi_1"), ("wo",)),
    _Family(("intermediate.dense",), ("output.dense",)),
    _Family(("dense_h_to_4h",), ("dense_4h_to_h",)),
)


def auto_plan(model: Any, device_mesh: DeviceMesh, *, verbose: bool = True
              ) -> dict[str, ParallelStyle]:
    """Propose a plan for a model of the usual make: decoders, encoders, their embedding and head.

    Args:
        model: the model; it is only looked at.
        device_mesh: mesh of the one axis that layers shall be split over.
        verbose: whether the axis' first rank prints the plan, and what stays whole and why.

    Returns:
        Styles by path, an ordinary dict to be edited and given to ``parallelize_module``.  A path
        has a ``*`` for a number wherever all layers that it names have the same style.

    Raises:
        TypeError: no module, or no mesh.
        ValueError: a mesh of several axes.
    """
    if not isinstance(model, platform.Module):
        raise TypeError(f"auto_plan takes a module, but got a {type(model).__name__}.")
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"auto_plan needs a DeviceMesh of hyper_parallel, but got {device_mesh!r}.")
    if device_mesh.ndim != 1:
        raise ValueError(f"a plan splits layers over one axis, but the mesh has the axes "
                         f"{device_mesh.alias_name}; pass one, as in "
                         f"mesh[{device_mesh.alias_name[-1]!r}].")
    proposal = _Proposal(dict(platform.named_modules(model)), device_mesh.size())
    proposal.add_families()
    proposal.add_vocabulary()
    plan = _with_wildcards(proposal.styles, list(proposal.modules))
    if verbose and device_mesh.get_local_rank() == 0:
        print(_picture(type(model).__name__, device_mesh, plan, proposal.whole))
    return plan


class _Proposal:
    """A plan that grows.

    Args:
        modules: the model's modules by path.
        size: number of ranks.
    """

    def __init__(self, modules: dict[str, Any], size: int) -> None:
        self.modules = modules
        self.styles: dict[str, ParallelStyle] = {}
        self.whole: dict[str, str] = {}
        self._size = size

    def add_families(self) -> None:
        """The layers within blocks."""
        for path in self.modules:
            prefix = path + "." if path else ""
            for family in _FAMILIES:
                columns = [prefix + name for name in family.columns]
                row = next((prefix + name for name in family.rows
                            if self._features(prefix + name) is not None), None)
                if row is None or row in self.styles or row in self.whole or \
                        any(self._features(column) is None for column in columns):
                    continue
                self._add_family(columns, row)

    def _add_family(self, columns: list[str], row: str) -> None:
        taken, _ = self._features(row)
        _, given = self._features(columns[0])
        if given % taken:
            return  # they do not belong together
        reason = self._obstacle(columns[0], taken)
        if reason is not None:
            self.whole.update(dict.fromkeys([*columns, row], reason))
            return
        for column in columns:
            reason = self._obstacle(column, self._features(column)[1])
            if reason is None:
                self.styles[column] = ColwiseParallel()
            else:
                self.whole[column] = reason
        self.styles[row] = RowwiseParallel()

    def _obstacle(self, column: str, features: int) -> Optional[str]:
        """Why the outputs of a layer cannot be split."""
        length = head_length(self.modules.get(column.rpartition(".")[0]), features)
        count, what = (features, "features") if length is None else (features // length, "heads")
        if count % self._size:
            return f"{count} {what} on {self._size} ranks"
        return None

    def add_vocabulary(self) -> None:
        """The embedding of words, and the head that gives a score for each of them."""
        by_size: dict[int, list[str]] = {}
        for path, module in self.modules.items():
            if platform.layer_kind(module) == "linear" and path not in self.styles:
                by_size.setdefault(self._features(path)[1], []).append(path)
        for path, module in self.modules.items():
            if platform.layer_kind(module) != "embedding":
                continue
            weight = platform.own_parameters(module)["weight"]
            heads = [head for head in by_size.get(weight.shape[0], ())
                     if platform.own_parameters(self.modules[head]).get("weight") is weight
                     or tuple(self._features(head)) == (weight.shape[1], weight.shape[0])]
            obstacle = platform.obstacle_to_splitting(module)
            if heads and obstacle is None:
                self.styles[path] = RowwiseParallel()
                self.styles.update(dict.fromkeys(
                    heads, ColwiseParallel(output_layouts=Replicate())))
            elif heads:
                self.whole[path] = obstacle

    def _features(self, path: str) -> Optional[tuple[int, int]]:
        """Numbers of inputs and of outputs of a linear layer; None for another module."""
        module = self.modules.get(path)
        kind = None if module is None else platform.layer_kind(module)
        if kind not in ("linear", "transposed_linear") or \
                platform.obstacle_to_splitting(module) is not None:
            return None
        weight = platform.own_parameters(module).get("weight")
        if weight is None:
            return None
        inputs, outputs = weight.shape if kind == "transposed_linear" else weight.shape[::-1]
        return inputs, outputs


def _with_wildcards(styles: dict[str, ParallelStyle], paths: list[str]
                    ) -> dict[str, ParallelStyle]:
    """The plan with a ``*`` for the numbers of blocks, where all blocks are alike."""
    plan: dict[str, ParallelStyle] = {}
    for path, style in styles.items():
        pattern = ".".join("*" if name.isdigit() else name for name in path.split("."))
        named = set(_named_by(pattern, paths))
        alike = all(styles.get(other) == style for other in named)
        plan[pattern if alike else path] = style
    return plan


def _named_by(pattern: str, paths: list[str]) -> Iterator[str]:
    """The paths that an entry of a plan names."""
    wanted = pattern.split(".")
    for path in paths:
        names = path.split(".")
        if len(names) == len(wanted) and all(map(fnmatchcase, names, wanted)):
            yield path


def _picture(name: str, mesh: DeviceMesh, plan: dict[str, ParallelStyle], whole: dict[str, str]
             ) -> str:
    """The plan as text."""
    width = max(map(len, plan), default=0)
    lines = [f"plan for {name} on {mesh.alias_name[0]}={mesh.size()}"]
    lines += [f"  {path:<{width}}  {brief_style(style)}" for path, style in plan.items()]
    if not plan:
        lines.append("  no layer pattern that is known here; write a plan by hand")
    reasons: dict[str, list[str]] = {}
    for path, reason in whole.items():
        reasons.setdefault(reason, []).append(path)
    lines += [f"  whole: {paths[0]}" + (f" and {len(paths) - 1} more" if paths[1:] else "")
              + f" ({reason})" for reason, paths in reasons.items()]
    lines.append("  all other modules are whole on every rank")
    return "\n".join(lines)
