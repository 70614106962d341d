"""Processes and process groups on torch.distributed.

A *life* is the time from one ``init_process_group`` to the next ``destroy_process_group``.
Everything made in a life dies with it, and a mesh compares the number of lives that ended
(the *generation*) to know that its groups are gone.

Making a group needs only its members, which may have made any other groups before. torch's own
``new_group`` cannot do that: it wants every rank of the world, or, with
``use_local_synchronization``, names a group by how many groups the process has made, so that
members with different histories wait for each other for ever. Here each member writes a key into
the default group's store, waits for the keys of the others, and then makes the group with the
function under ``new_group``. The name comes from the ordered ranks, from how often these ranks
made their group before (a user can destroy it), and from the life's token, a random word that the
first process to need it puts into the store.
"""
import functools
import hashlib
import os
import threading
import time
import uuid
import weakref
from collections import Counter
from datetime import timedelta
from typing import Any, Callable, Optional, Sequence

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.platform import checks
from hyper_parallel.platform.checks import shown
from hyper_parallel.platform.torch.solo_group import SoloGroup

Group = dist.ProcessGroup

_LONGEST_PAUSE = 0.05  # seconds between two looks at the store


class _Life:
    """What was made while one default group existed."""

    def __init__(self, default: Group) -> None:
        self.default = weakref.ref(default)
        self.groups: dict[tuple[int, ...], Group] = {}
        self.times_made: Counter[tuple[int, ...]] = Counter()
        self.locks: dict[tuple[int, ...], threading.Lock] = {}
        self.token = ""


class _History:
    """The current life and how many were seen to end."""

    def __init__(self) -> None:
        self.ended = 0
        self.spent_tokens: set[str] = set()
        self.life: Optional[_Life] = None

    def look(self) -> Optional[_Life]:
        """The current life, None while there is no default group."""
        default = dist.group.WORLD
        life = self.life
        if life is not None and (default is None or life.default() is not default):
            self.ended += 1
            self.spent_tokens.add(life.token)
            self.life = life = None
        if life is None and default is not None:
            self.life = life = _Life(default)
        return life


_history = _History()
_solo = SoloGroup()


def _internal(name: str) -> Any:
    """A private name of torch.distributed that this module cannot do without."""
    try:
        return getattr(distributed_c10d, name)
    except AttributeError:
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.distributed.distributed_c10d.{name}, which "
            f"making a process group needs; install a release that this library supports "
            f"(torch 2.13)") from None


# ---- processes ----

def is_initialized() -> bool:
    """Whether the default group exists."""
    return dist.group.WORLD is not None


def _launched(variable: str) -> Optional[int]:
    """The number a launcher such as torchrun left in ``variable``, None without a launcher."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    text = os.environ[variable]
    if not text.isdecimal():
        raise ValueError(f"the environment variable {variable} must be a whole number, got "
                         f"{text!r}: start with torchrun, or unset RANK and WORLD_SIZE")
    return int(text)


def get_rank() -> int:
    """Rank in the default group, else the launcher's, else 0."""
    default = dist.group.WORLD
    return default.rank() if default is not None else _launched("RANK") or 0


def known_world_size() -> Optional[int]:
    """Size of the default group, else the launcher's, else None."""
    default = dist.group.WORLD
    return default.size() if default is not None else _launched("WORLD_SIZE")


def generation() -> int:
    """How many default groups were seen to be destroyed."""
    _history.look()
    return _history.ended


def init_process_group(backend: Optional[str], device: Any, timeout: Optional[timedelta]) -> None:
    """Make the default group; see ``Platform.init_process_group``."""
    checks.refuse_second_default(is_initialized())
    _history.look()
    wanted = None if device is None else torch.device(device)
    accelerator = wanted.type if wanted is not None else _accelerator()
    if accelerator != "cpu":
        _select_accelerator(accelerator, None if wanted is None else wanted.index)
    if backend is None:
        own = dist.get_default_backend_for_device(accelerator)
        mixed = wanted is None and accelerator != "cpu"
        backend = f"cpu:gloo,{accelerator}:{own}" if mixed else own
    if _launched("WORLD_SIZE") is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1,
                                timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    _history.look()


def _accelerator() -> str:
    return torch.accelerator.current_accelerator().type if torch.accelerator.is_available() \
        else "cpu"


def _select_accelerator(kind: str, index: Optional[int]) -> None:
    """Make the device this process works on the current one: given, else by ``LOCAL_RANK``.

    Without this every process of a machine would use device 0.
    """
    if index is None and os.environ.get("LOCAL_RANK", "").isdecimal():
        index = int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count()
    if index is not None:
        torch.accelerator.set_device_index(torch.device(kind, index))


def destroy_process_group() -> None:
    """Destroy the default group, if there is one, and all groups made from it."""
    _history.look()
    if is_initialized():
        dist.destroy_process_group()
    _history.look()


# ---- groups ----

def get_group_size(group: Optional[Group]) -> int:
    """Number of ranks in ``group``."""
    return dist.get_world_size() if group is None else group.size()


def get_group_rank(group: Optional[Group]) -> int:
    """Position of this process in ``group``."""
    return dist.get_rank() if group is None else group.rank()


def get_group_ranks(group: Optional[Group]) -> tuple[int, ...]:
    """Global ranks of ``group`` in its order."""
    return (get_rank(),) if group is _solo else tuple(dist.get_process_group_ranks(group))


def store_of(group: Optional[Group]) -> Optional[dist.Store]:
    """The store that the members of ``group`` share; None where the members are not real.

    Raises:
        RuntimeError: torch.distributed is not initialised or does not know the group.
    """
    default = dist.group.WORLD
    if default is None:
        raise RuntimeError("there is no default group, so its ranks share nothing; call "
                           "init_process_group() first")
    known = _internal("_world").pg_map.get(default if group is None else group)
    if known is None:
        raise RuntimeError(f"torch.distributed does not know the group {group!r}; it was "
                           "destroyed, or belongs to an earlier default group")
    backend, store = known
    return None if backend == "fake" else store


def self_group() -> Group:
    """The group of this process alone.

    torch.distributed learns of it once the default group exists; before that
    ``dist.get_rank(group)`` does not answer, as torch has no ranks yet.
    """
    if _history.look() is not None:
        world = _internal("_world")
        if _solo not in world.pg_group_ranks:
            backend, store = world.pg_map[dist.group.WORLD]
            _internal("_register_pg_in_world")(
                _solo, backend_name=backend, store=store, group_name=_solo.group_name,
                backend_config=world.pg_backend_config[dist.group.WORLD],
                rank_mapping={dist.get_rank(): 0})
    return _solo


def create_group(rank_list: Sequence[int]) -> Group:
    """The group of ``rank_list`` in that order; see ``Platform.create_group``."""
    ranks = checks.checked_ranks(rank_list)
    life = _life_or_start(ranks)
    world_size, own = dist.get_world_size(), dist.get_rank()
    checks.check_membership(ranks, world_size, own)
    if ranks == tuple(range(world_size)):
        return dist.group.WORLD
    if len(ranks) == 1:
        return self_group()
    with life.locks.setdefault(ranks, threading.Lock()):
        group = life.groups.get(ranks)
        if group is None or group not in _internal("_world").pg_map:
            group = life.groups[ranks] = _make_group(life, ranks)
        return group


def adopt_group(ranks: tuple[int, ...], group: Group) -> None:
    """Let a group that somebody else made be the one of ``ranks``, if it keeps their order."""
    if len(ranks) > 1 and get_group_ranks(group) == ranks:
        _life_or_start(ranks).groups.setdefault(ranks, group)


def _life_or_start(ranks: tuple[int, ...]) -> _Life:
    """The current life; a process that a launcher started begins it here."""
    if not is_initialized():
        if _launched("WORLD_SIZE") is None:
            raise RuntimeError(
                f"the group of ranks {shown(ranks)} needs several processes, and this one was "
                f"not started as one of them: start the program with torchrun "
                f"--nproc-per-node=N, or call init_process_group() first")
        init_process_group(None, None, None)
    return _history.look()


def _make_group(life: _Life, ranks: tuple[int, ...]) -> Group:
    default = life.default()
    world = _internal("_world")
    backend, store = world.pg_map[default]
    timeout = _timeout_of(default)
    digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    name = f"hyper_parallel_{len(ranks)}_{digest}_{life.times_made[ranks]}"
    if backend != "fake":  # the fake backend has no peers to wait for, and no store
        name = f"{name}_{_token_of(life, store)}"
        _meet(store, name, ranks, timeout)
    make = functools.partial(
        _internal("_new_process_group_helper"), len(ranks), ranks.index(default.rank()),
        list(ranks), backend, store, name, timeout=timeout, device_id=default.bound_device_id,
        group_desc="hyper_parallel")
    try:
        group, _ = _without_split(default, make)
    except RuntimeError as error:
        raise RuntimeError(f"the members of the group {shown(ranks)} all asked for it but "
                           f"could not connect: {error}") from error
    world.pg_group_ranks[group] = {rank: position for position, rank in enumerate(ranks)}
    life.times_made[ranks] += 1
    return group


def _timeout_of(default: Group) -> timedelta:
    """How long the default group waits for its members."""
    devices = getattr(default, "_device_types")
    backend = getattr(default, "_get_backend")(devices[0]) if devices else None
    return getattr(getattr(backend, "options", None), "_timeout", dist.default_pg_timeout)


def _without_split(default: Group, make: Callable[[], Any]) -> Any:
    """Run ``make`` so that torch connects the members afresh.

    With a device bound to the default group torch would split its communicator instead, which
    every rank of the world has to take part in.
    """
    bound = default.bound_device_id
    if bound is None:
        return make()
    default.bound_device_id = None
    try:
        return make()
    finally:
        default.bound_device_id = bound


def _token_of(life: _Life, store: dist.Store) -> str:
    """The word that all processes of this life, and no other life, have in common.

    A store can outlive a life (a launcher's own store does), so a token this process used in an
    earlier life, or one that has a successor already, leads on to the next.
    """
    token = life.token
    if not token:
        token = "hyper_parallel_life"
        while token == "hyper_parallel_life" or token in _history.spent_tokens \
                or store.check([token]):
            token = store.compare_set(token, "", uuid.uuid4().hex).decode()
        life.token = token
    return token


def _meet(store: dist.Store, name: str, ranks: tuple[int, ...], timeout: timedelta) -> None:
    """Wait until every member has asked for the group."""
    def key(rank: int) -> str:
        return f"{name}/{rank}"

    own = dist.get_rank()
    store.set(key(own), "here")
    others = [rank for rank in ranks if rank != own]
    keys = [key(rank) for rank in others]
    deadline = time.monotonic() + timeout.total_seconds()
    pause = 0.001
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [rank for rank in others if not store.check([key(rank)])]
            raise RuntimeError(
                f"rank {own} waited {timeout.total_seconds():g} s for the group {shown(ranks)}, "
                f"but {shown(missing)} never asked for it: every member of a group must call "
                f"get_group (or create_group) for it")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
