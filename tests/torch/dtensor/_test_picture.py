"""What a picture says is what the ranks hold."""
import itertools
import re

import torch
import torch.distributed as dist

from hyper_parallel import (
    CommDebugMode, Partial, Replicate, Shard, distribute_tensor, init_device_mesh,
    visualize_sharding)

NPROC = 4
TIMEOUT = 120


def _members(label):
    """The ranks of a cell, such as ``0-2`` or ``0+1,2+3``."""
    ranks = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", label):
        ranks += range(int(first), int(last or first) + 1)
    return ranks


def _held(text, rank):
    """For each grid in which a rank stands: its dims' ranges as the picture tells them."""
    dims = re.search(r"rows: dim (\d+), columns: dim (\d+)", text)
    outer, columns, found = {}, [], []
    for line in text.split("\n")[1:]:
        if line.startswith("dim "):
            outer = {int(dim): _range(bounds)
                     for dim, bounds in re.findall(r"dim (\d+) at (\S+?)(?:,|$)", line)}
        elif "│" in line:
            row, *cells = [part.strip() for part in line.split("│")]
            for column, cell in zip(columns, cells):
                if rank in _members(cell):
                    places = {int(dims[2]) if dims else 0: _range(column)}
                    found.append(outer | places | ({int(dims[1]): _range(row)} if dims else {}))
        elif re.fullmatch(r" *(\d+:\d+ *)+", line):
            columns = line.split()
    return found


def _range(text):
    start, end = text.split(":")
    return slice(int(start), int(end))


def _check(mesh, shape, placements, order=None):
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    tensor = distribute_tensor(whole, mesh, [Replicate()] * mesh.ndim)
    tensor = tensor.redistribute(placements=placements, shard_order=order)
    with CommDebugMode() as mode:
        text = str(visualize_sharding(tensor))
        drawn = mesh.visualize().svg
    assert mode.get_total_counts() == 0 and drawn
    local = tensor.to_local()
    if local.numel() == 0:
        empty = re.search(r"holds nothing: (.*)", text)
        assert mesh.rank in _members(empty[1]) and _held(text, mesh.rank) == [], text
    else:
        assert f"holds nothing: {mesh.rank}" not in text
        place, = _held(text, mesh.rank)
        part = whole[tuple(place.get(dim, slice(None)) for dim in range(len(shape)))]
        assert part.shape == local.shape, (text, part.shape, local.shape)
        if not any(placement.is_partial() for placement in placements):
            assert torch.equal(part, local), text
    texts = [None] * mesh.size()
    dist.all_gather_object(texts, text)
    assert len(set(texts)) == 1


def test_one_axis():
    mesh = init_device_mesh((4,), ("tp",))
    for shape in ((1,), (5,), (8,), (5, 7), (2, 9), (3, 5, 2)):
        for placement in (Replicate(), Partial(), *map(Shard, range(len(shape)))):
            _check(mesh, shape, [placement])


def test_two_axes_and_ranks_in_another_order():
    for ranks in ((0, 1, 2, 3), (3, 1, 2, 0)):
        mesh = init_device_mesh((2, 2), ("dp", "tp"), rank_list=ranks)
        for shape in ((5,), (5, 3), (1, 6), (3, 5, 2)):
            ways = (Replicate(), Partial(), *map(Shard, range(len(shape))))
            for placements in itertools.product(ways, repeat=2):
                _check(mesh, shape, placements)


def test_order_of_the_axes():
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    for shape in ((8,), (5,), (3, 6), (2, 2, 3)):
        _check(mesh, shape, [Shard(0), Shard(0)], {0: ("tp", "dp")})


def test_three_split_dims_have_a_grid_for_each_block():
    mesh = init_device_mesh((1, 2, 2), ("dp", "cp", "tp"))
    for dims in itertools.permutations(range(3)):
        _check(mesh, (3, 5, 2), [Shard(dim) for dim in dims])
