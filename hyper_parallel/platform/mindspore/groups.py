"""Processes and process groups on MindSpore.

MindSpore knows a group by its name. The name here comes from the ordered ranks, so that all members
find the same one, whatever groups they made before; only they take part in its making. A
collective before ``init()`` would crash the process, so nothing is sent before
:func:`is_initialized`.

A process that no launcher started is a world of its own, which MindSpore never hears of.
"""
from __future__ import annotations

import hashlib
import math
import os
import sys
from datetime import timedelta
from typing import Any, Optional, Sequence

import mindspore
from mindspore import communication
from mindspore.communication import GlobalComm
from mindspore.mint import distributed as dist

from hyper_parallel.platform import checks


# The seconds that MindSpore waits for ranks to start, for a group's members, for a collective's.
_TIMEOUTS = ("MS_TOPO_TIMEOUT", "MS_NODE_TIMEOUT", "MS_CPU_COMM_OP_TIMEOUT")


class Group(str):
    """The ranks that communicate, in their order. It is MindSpore's name of the group as well.

    So it can be given as ``group=`` to MindSpore's own functions.
    """

    ranks: tuple[int, ...]

    def __new__(cls, name: str, ranks: Sequence[int]) -> "Group":
        self = super().__new__(cls, name)
        self.ranks = tuple(ranks)
        return self

    def __getnewargs__(self) -> tuple:
        return str(self), self.ranks

    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def rank(self) -> int:
        """Position of this process."""
        return self.ranks.index(get_rank())


class _Life:
    """The time from one ``init_process_group`` to the next ``destroy_process_group``."""

    def __init__(self, ranks: Sequence[int], own: int) -> None:
        self.world = Group(GlobalComm.WORLD_COMM_GROUP, ranks)
        self.own = own
        self.groups: dict[tuple[int, ...], Group] = {self.world.ranks: self.world}


class _History:
    """The current life, and how many were seen to end."""

    def __init__(self) -> None:
        self.ended = 0
        self.life: Optional[_Life] = None
        self.alone = False  # the life is one that MindSpore does not know

    def look(self) -> Optional[_Life]:
        """The current life, None while there is no default group."""
        known = dist.is_initialized()
        if self.life is not None and not known and not self.alone:
            self.ended += 1
            self.life = None
        if self.life is None and known:
            self.life = _Life(range(dist.get_world_size()), dist.get_rank())
        return self.life


_history = _History()


def is_initialized() -> bool:
    """Whether the default group exists."""
    return _history.look() is not None


def _launched(variable: str) -> Optional[int]:
    """The number that a launcher such as msrun left in ``variable``, None without a launcher."""
    if os.environ.get("MS_ROLE") != "MS_WORKER" or variable not in os.environ:
        return None
    text = os.environ[variable]
    if not text.isdecimal():
        raise ValueError(f"the environment variable {variable} must be a whole number, got "
                         f"{text!r}: start with msrun, or unset MS_ROLE")
    return int(text)


def get_rank() -> int:
    """Rank in the default group, else the launcher's, else 0."""
    life = _history.look()
    return life.own if life is not None else _launched("RANK_ID") or 0


def known_world_size() -> Optional[int]:
    """Size of the default group, else the launcher's, else None."""
    life = _history.look()
    return life.world.size() if life is not None else _launched("MS_WORKER_NUM")


def get_world_size() -> int:
    """Size of the default group, else the launcher's, else 1."""
    return known_world_size() or 1


def generation() -> int:
    """How many default groups were seen to be destroyed."""
    _history.look()
    return _history.ended


def init_process_group(backend: Optional[str] = None, device: Any = None,
                       timeout: Optional[timedelta] = None) -> None:
    """Make the default group; see ``Platform.init_process_group``.

    MindSpore takes the timeout from environment variables, in whole seconds, which are set here and
    stay set: of all ranks' start (by default 30 minutes), of a group's making (200 s) and, on the
    CPU, of a collective (30 s). In the scheduler that msrun starts beside the ranks this does not
    return.
    """
    checks.refuse_second_default(is_initialized())
    if timeout is not None:
        if not isinstance(timeout, timedelta):
            raise TypeError(f"timeout must be a timedelta, got a {type(timeout).__name__}")
        seconds = math.ceil(timeout.total_seconds())
        if seconds < 1:
            raise ValueError(f"timeout must be longer than 0 s, got {timeout}")
        os.environ.update(dict.fromkeys(_TIMEOUTS, str(seconds)))
    if device is not None:
        mindspore.set_device(str(device))
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        # msrun starts the program once more for the scheduler, which serves the ranks until they
        # end and has no part in the program.
        communication.init(backend)
        sys.exit(0)
    if _launched("MS_WORKER_NUM") is None:
        _history.life, _history.alone = _Life((0,), 0), True
    else:
        communication.init(backend)
    _history.look()


def destroy_process_group() -> None:
    """Destroy the default group, if there is one, and all groups made from it."""
    if _history.look() is None:
        return
    if _history.alone:
        _history.life, _history.alone = None, False
        _history.ended += 1
    else:
        dist.destroy_process_group()
        _history.look()


def world() -> Group:
    """The default group.

    Raises:
        RuntimeError: there is none.
    """
    life = _history.look()
    if life is None:
        raise RuntimeError("there is no default group; call init_process_group() first, in a "
                           "program that msrun started")
    return life.world


def get_group_size(group: Optional[str]) -> int:
    """Number of ranks in ``group``."""
    return group.size() if isinstance(group, Group) else len(get_group_ranks(group))


def get_group_rank(group: Optional[str]) -> int:
    """Position of this process in ``group``."""
    return get_group_ranks(group).index(get_rank())


def get_group_ranks(group: Optional[str]) -> tuple[int, ...]:
    """Global ranks of ``group`` in its order; also of a group that MindSpore made by itself."""
    if isinstance(group, Group):
        return group.ranks
    default = world()
    if group is None or group == default:
        return default.ranks
    return tuple(dist.get_process_group_ranks(group))


def self_group() -> Group:
    """The group of this process alone, of which MindSpore never hears."""
    return Group(f"hyper_parallel_alone_{get_rank()}", (get_rank(),))


def create_group(rank_list: Sequence[int]) -> Group:
    """The group of ``rank_list`` in that order; see ``Platform.create_group``."""
    ranks = checks.checked_ranks(rank_list)
    life = _life_or_start(ranks)
    checks.check_membership(ranks, life.world.size(), life.own)
    if len(ranks) == 1:
        return self_group()
    group = life.groups.get(ranks)
    if group is None:
        digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        group = Group(f"hyper_parallel_{len(ranks)}_{digest}", ranks)
        try:
            communication.create_group(str(group), list(ranks))
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(
                f"rank {life.own} could not make the group {checks.shown(ranks)}: every member of "
                f"a group must call get_group (or create_group) for it, within the time that "
                f"MindSpore waits (init_process_group(timeout=...) sets it). Start the program "
                f"anew: after this failure MindSpore's communication cannot be relied on. It "
                f"said: {error}") from error
        life.groups[ranks] = group
    return group


def _life_or_start(ranks: tuple[int, ...]) -> _Life:
    """The current life; a process that a launcher started begins it here."""
    if not is_initialized():
        if _launched("MS_WORKER_NUM") is None:
            raise RuntimeError(
                f"the group of ranks {checks.shown(ranks)} needs several processes, and this one "
                f"was not started as one of them: start the program with msrun --worker_num=N")
        init_process_group()
    return _history.look()
