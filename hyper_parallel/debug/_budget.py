"""``assert_comms``: a test's budget of collectives and bytes."""
from __future__ import annotations

from collections.abc import Iterator, Mapping

from hyper_parallel.core.dtensor.debug import CommDebugMode, CommTrace

_METHODS = {
    "all_gather": "differentiable_all_gather_concat",
    "all_reduce": "differentiable_all_reduce",
    "reduce_scatter": "differentiable_reduce_scatter",
    "all_to_all": "differentiable_all_to_all",
    "all_to_all_single": "differentiable_all_to_all_single",
    "all_to_all_single_async": "differentiable_all_to_all_single_async",
    "all_reduce_async": "all_reduce_async",
    "broadcast": "broadcast",
    "scatter": "scatter",
}
_NAMES = {method: name for name, method in _METHODS.items()}
_NATIVE = "native_"

Counts = Mapping[str, int]


def assert_comms(trace: CommDebugMode | CommTrace, *, total: int | None = None,
                 bytes_at_most: int | None = None,
                 by_axis: Mapping[str, int | Counts] | None = None, **counts: int) -> None:
    """Fail unless a trace holds just these collectives; the message shows the tree.

    Args:
        trace: a mode after its exit, or a trace that was loaded.
        total: number of collectives in all.
        bytes_at_most: bytes that the rank may send, by the formulas of the documentation.
        by_axis: number of collectives for each mesh axis, or a mapping such as
            ``{"all_reduce": 2}`` of them; axes that are not named must have none.
        counts: number of collectives by kind: ``all_reduce=2``, and likewise ``all_gather``,
            ``reduce_scatter``, ``all_to_all``, ``all_to_all_single``,
            ``all_to_all_single_async``, ``all_reduce_async``, ``broadcast``, ``scatter``; and
            ``native_`` before the name of a function of the framework, ``native_send=1``. If any
            kind is named, the others must not occur.

    Raises:
        AssertionError: something else was sent, or the trace is incomplete.
        TypeError: a kind of collective that does not exist.
    """
    for kinds in (counts, *(value for value in (by_axis or {}).values()
                            if isinstance(value, Mapping))):
        _check_kinds(kinds)
    faults = list(_faults(trace, total, bytes_at_most, by_axis, counts))
    if faults:
        raise AssertionError("\n".join(
            ["the communication differs from its budget:", *(f"  {fault}" for fault in faults),
             "", trace.generate_comm_debug_tracing_table(1), "",
             trace.generate_comm_summary_table(("type", "axis", "module", "op", "phase"))]))


def _faults(trace: CommDebugMode | CommTrace, total: int | None, bytes_at_most: int | None,
            by_axis: Mapping[str, int | Counts] | None, counts: Counts) -> Iterator[str]:
    if trace.incomplete is not None:
        yield f"the trace is incomplete: {trace.incomplete}"
    if total is not None and trace.get_total_counts() != total:
        yield f"expected {total} collectives, but there are {trace.get_total_counts()}"
    sent = sum(trace.get_comm_bytes().values())
    if bytes_at_most is not None and sent > bytes_at_most:
        yield f"expected at most {bytes_at_most} bytes, but the rank sends {sent}"
    if counts:
        found = {_name(method): count for method, count in trace.get_comm_counts().items()}
        yield from _differences(counts, found, "")
    if by_axis is not None:
        kinds: dict[str, dict[str, int]] = {axis: {} for axis in by_axis}
        for (axis, method), sums in trace.get_comm_summary(("axis", "type")).items():
            kinds.setdefault(axis, {})[_name(method)] = sums["count"]
        for axis, found in kinds.items():
            expected = by_axis.get(axis, {})
            if isinstance(expected, Mapping):
                yield from _differences(expected, found, f" along {axis}")
            elif sum(found.values()) != expected:
                yield (f"expected {expected} collectives along {axis}, but there are "
                       f"{sum(found.values())}")


def _differences(expected: Counts, found: Counts, where: str) -> Iterator[str]:
    for kind in sorted({*expected, *found}):
        if expected.get(kind, 0) != found.get(kind, 0):
            yield f"expected {expected.get(kind, 0)} {kind}{where}, but found {found.get(kind, 0)}"


def _check_kinds(kinds: Counts) -> None:
    for kind in kinds:
        if kind not in _METHODS and not kind.startswith(_NATIVE):
            raise TypeError(f"assert_comms knows the collectives {', '.join(_METHODS)}, and those "
                            f"of the framework as {_NATIVE}*, but got {kind!r}.")


def _name(method: str) -> str:
    """A method's short name, which can be a keyword."""
    return _NAMES.get(method) or method.replace(".", "_")
