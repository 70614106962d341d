"""How groups come to be on four ranks: members only, any histories, any order, never a hang."""
import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.platform.torch import groups
from hyper_parallel.platform.torch.platform import TorchPlatform as platform

NPROC = 4
TIMEOUT = 20


def total(group: dist.ProcessGroup) -> float:
    """Sum of the members' ranks."""
    value = torch.tensor([float(platform.get_rank())])
    return platform.differentiable_all_reduce(value, "sum", group).item()


def test_members_with_different_histories() -> None:
    """Ranks 0 and 1 have a group already when the crossing pairs are made."""
    rank = dist.get_rank()
    if rank < 2:
        assert total(platform.create_group([0, 1])) == 1
    assert total(platform.create_group([rank % 2, rank % 2 + 2])) == 2 * (rank % 2) + 2
    if rank >= 2:
        assert total(platform.create_group([2, 3])) == 5
    assert total(platform.create_group([3, 2, 1, 0])) == 6


def test_the_order_is_that_of_the_list() -> None:
    """For our methods and for torch's own."""
    rank = dist.get_rank()
    order = [2, 0, 3, 1]
    group = platform.create_group(order)
    assert isinstance(group, dist.ProcessGroup)
    assert platform.get_group_ranks(group) == (2, 0, 3, 1)
    assert dist.get_process_group_ranks(group) == order
    assert platform.get_group_rank(group) == group.rank() == dist.get_rank(group) \
        == order.index(rank)
    assert platform.get_group_size(group) == dist.get_world_size(group) == 4
    assert dist.get_global_rank(group, 0) == 2
    gathered = [torch.zeros(1, dtype=torch.int64) for _ in order]
    dist.all_gather(gathered, torch.tensor([rank]), group=group)
    assert [piece.item() for piece in gathered] == order
    sent = torch.tensor([rank])
    dist.broadcast(sent, src=3, group=group)
    assert sent.item() == 3
    objects = [None] * 4
    dist.all_gather_object(objects, rank, group=group)
    assert objects == order


def test_the_same_ranks_give_the_same_group() -> None:
    """All ranks in order are the default group, one rank is the group of itself."""
    rank = dist.get_rank()
    assert platform.create_group([0, 1, 2, 3]) is dist.group.WORLD
    assert platform.create_group(range(4)) is dist.group.WORLD
    assert platform.create_group([rank]) is platform.self_group()
    pair = [rank - rank % 2, rank - rank % 2 + 1]
    first = platform.create_group(pair)
    assert platform.create_group(tuple(pair)) is first
    assert platform.create_group(pair[::-1]) is not first
    assert platform.get_group_ranks(platform.self_group()) == (rank,)
    assert dist.get_process_group_ranks(platform.self_group()) == [rank]


def test_a_group_inherits_backend_and_timeout() -> None:
    """From the default group."""
    group = platform.create_group([1, 0, 3, 2])
    assert dist.get_backend(group) == "gloo"
    assert groups._timeout_of(group) == groups._timeout_of(dist.group.WORLD)
    assert groups._timeout_of(group).total_seconds() == 20


def test_what_no_group_can_hold() -> None:
    """ValueError at once: ranks outside the world, and a caller outside the group."""
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=r"ranks of the world, 0 to 3, got \[0, 1, 2, 3, 4\]"):
        platform.create_group(range(5))
    others = [other for other in range(4) if other != rank]
    with pytest.raises(ValueError, match=f"only members make a group: rank {rank} is not in"):
        platform.create_group(others)


def test_a_group_that_was_destroyed_is_made_again() -> None:
    """By torch's own call, while the world goes on."""
    rank = dist.get_rank()
    pair = [rank - rank % 2 + 1, rank - rank % 2]
    group = platform.create_group(pair)
    assert total(group) == sum(pair)
    dist.destroy_process_group(group)
    again = platform.create_group(pair)
    assert again is not group
    assert total(again) == sum(pair)
    assert platform.create_group(pair) is again


def test_two_threads_ask_for_the_same_group() -> None:
    """Both get the one group."""
    made = []
    threads = [threading.Thread(target=lambda: made.append(platform.create_group([3, 0, 2, 1])))
               for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made[0] is made[1]
    assert total(made[0]) == 6


def test_a_bound_device_is_not_split() -> None:
    """With a device bound to the world torch would split its communicator, for which every rank
    would have to come; the device is bound again afterwards."""
    world, rank = dist.group.WORLD, dist.get_rank()
    seen = []
    assert groups._without_split(world, lambda: 1) == 1
    world.bound_device_id = torch.device("cuda:0")
    try:
        groups._without_split(world, lambda: seen.append(world.bound_device_id))
        with pytest.raises(KeyError):
            groups._without_split(world, lambda: {}[rank])
        assert seen == [None]
        assert world.bound_device_id == torch.device("cuda:0")
    finally:
        world.bound_device_id = None


def test_members_that_cannot_connect() -> None:
    """The error names the group and keeps torch's reason."""
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise dist.DistBackendError("connection reset by peer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_c10d, "_new_process_group_helper", refuse)
        with pytest.raises(RuntimeError, match=r"\[0, 3, 1, 2\] all asked for it but could not "
                                               r"connect: connection reset by peer"):
            platform.create_group([0, 3, 1, 2])
    assert total(platform.create_group([0, 3, 1, 2])) == 6


def crew_store() -> dist.TCPStore:
    """The store that outlives every default group of these processes."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                         is_master=False)


def begin(name: str, store: dist.Store) -> None:
    """Make a default group whose keys no other one has."""
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store),
                            rank=int(os.environ["RANK"]), world_size=4,
                            timeout=timedelta(seconds=TIMEOUT))


def test_another_life() -> None:
    """After destroy and init nothing of the old world is handed out, and all works again.

    Rank 0 did not look at the first life, so that the ranks count lives differently.
    """
    rank = dist.get_rank()
    if rank == 0:
        groups._history.__init__()
    else:
        before = platform.create_group([1, 2, 3])
        assert total(before) == 6
        generation = platform.generation()
    dist.barrier()
    dist.destroy_process_group()
    begin("another life", crew_store())
    if rank == 0:
        assert platform.generation() == 0
    else:
        assert platform.generation() == generation + 1
        after = platform.create_group([1, 2, 3])
        assert after is not before and total(after) == 6
    alone = platform.self_group()
    assert dist.get_rank(alone) == 0 and dist.get_process_group_ranks(alone) == [rank]
    assert total(platform.create_group([1, 3, 0, 2])) == 6
    dist.barrier()


def test_lives_that_share_a_store() -> None:
    """A launcher's store can outlive the world: what one life wrote must not mislead the next."""
    store = crew_store()
    tokens = []
    for number in range(3):
        dist.barrier()
        dist.destroy_process_group()
        begin(f"life {number}", store)
        life = groups._history.look()
        tokens.append(groups._token_of(life, store))
        assert groups._token_of(life, store) == life.token == tokens[-1]
        assert total(platform.create_group([3, 1, 2, 0])) == 6
    assert len(set(tokens)) == 3
    everybody = [None] * 4
    dist.all_gather_object(everybody, tokens)
    assert everybody == [tokens] * 4
