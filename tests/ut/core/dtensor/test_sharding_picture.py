"""Pictures of shardings, to the character."""
import xml.etree.ElementTree as ET

import pytest
import torch

from hyper_parallel import (
    DTensor, Layout, Partial, Replicate, Shard, get_platform, init_device_mesh, visualize_sharding)
from hyper_parallel.core.layout import TensorSpec

R, P = Replicate(), Partial()
NAMES = ("dp", "cp", "tp")
SVG = "{http://www.w3.org/2000/svg}"


def picture(shape, mesh_shape, placements, order=None):
    """The picture of a tensor of which this process is rank 0."""
    mesh = init_device_mesh(mesh_shape, NAMES[-len(mesh_shape):] if len(mesh_shape) != 2
                            else ("dp", "tp"))
    spec = TensorSpec(Layout(mesh, placements, order), shape)
    return visualize_sharding(get_platform().dress(torch.empty(spec.local_shape), DTensor, spec))


CASES = {
    "uneven on one axis": ((5,), (4,), [Shard(0)], None, """\
[5], tp=Shard(dim=0)
  0:2   2:4   4:5
┌─────┬─────┬─────┐
│  0  │  1  │  2  │
└─────┴─────┴─────┘
holds nothing: 3"""),
    "uneven on two axes": ((5, 3), (2, 2), [Shard(0), Shard(1)], None, """\
[5, 3], dp=Shard(dim=0), tp=Shard(dim=1)
rows: dim 0, columns: dim 1
      0:2   2:3
    ┌─────┬─────┐
0:3 │  0  │  1  │
    ├─────┼─────┤
3:5 │  2  │  3  │
    └─────┴─────┘"""),
    "the axes swapped": ((5, 3), (2, 2), [Shard(1), Shard(0)], None, """\
[5, 3], dp=Shard(dim=1), tp=Shard(dim=0)
rows: dim 0, columns: dim 1
      0:2   2:3
    ┌─────┬─────┐
0:3 │  0  │  2  │
    ├─────┼─────┤
3:5 │  1  │  3  │
    └─────┴─────┘"""),
    "two axes on one dim": ((5, 4), (2, 2), [Shard(0), Shard(0)], None, """\
[5, 4], dp=Shard(dim=0), tp=Shard(dim=0)
rows: dim 0, columns: dim 1
      0:4
    ┌─────┐
0:2 │  0  │
    ├─────┤
2:3 │  1  │
    ├─────┤
3:4 │  2  │
    ├─────┤
4:5 │  3  │
    └─────┘"""),
    "order": ((8,), (2, 2), [Shard(0), Shard(0)], {0: ("tp", "dp")}, """\
[8], dp=Shard(dim=0), tp=Shard(dim=0), dim 0 split by tp then dp
  0:2   2:4   4:6   6:8
┌─────┬─────┬─────┬─────┐
│  0  │  2  │  1  │  3  │
└─────┴─────┴─────┴─────┘"""),
    "uneven in another order": ((5,), (2, 2), [Shard(0), Shard(0)], {0: ("tp", "dp")}, """\
[5], dp=Shard(dim=0), tp=Shard(dim=0), dim 0 split by tp then dp
  0:2   2:3   3:4   4:5
┌─────┬─────┬─────┬─────┐
│  0  │  2  │  1  │  3  │
└─────┴─────┴─────┴─────┘"""),
    "two ranks of four hold nothing": ((2, 6), (2, 2), [Shard(0), Shard(0)], None, """\
[2, 6], dp=Shard(dim=0), tp=Shard(dim=0)
rows: dim 0, columns: dim 1
      0:6
    ┌─────┐
0:1 │  0  │
    ├─────┤
1:2 │  2  │
    └─────┘
holds nothing: 1,3"""),
    "replicas": ((4, 6), (2, 2), [R, Shard(1)], None, """\
[4, 6], dp=Replicate(), tp=Shard(dim=1)
rows: dim 0, columns: dim 1
      0:3   3:6
    ┌─────┬─────┐
0:4 │ 0,2 │ 1,3 │
    └─────┴─────┘"""),
    "whole": ((4, 6), (2, 2), [R, R], None, """\
[4, 6], dp=Replicate(), tp=Replicate()
rows: dim 0, columns: dim 1
      0:6
    ┌─────┐
0:4 │ 0-3 │
    └─────┘"""),
    "a Partial and a Shard": ((4, 6), (2, 2), [Shard(0), Partial("max")], None, """\
[4, 6], dp=Shard(dim=0), tp=Partial(max)
rows: dim 0, columns: dim 1
      0:6
    ┌─────┐
0:2 │ 0+1 │
    ├─────┤
2:4 │ 2+3 │
    └─────┘
a+b: each holds a term, to be reduced by max"""),
    "a Partial of two replicas": ((2, 2), (2, 2), [P, R], None, """\
[2, 2], dp=Partial(sum), tp=Replicate()
rows: dim 0, columns: dim 1
        0:2
    ┌─────────┐
0:2 │ 0+2,1+3 │
    └─────────┘
a+b: each holds a term, to be reduced by sum"""),
    "no dims": ((), (2, 2), [R, P], None, """\
[], dp=Replicate(), tp=Partial(sum)
┌─────────┐
│ 0+1,2+3 │
└─────────┘
a+b: each holds a term, to be reduced by sum"""),
    "no elements": ((0, 3), (2, 2), [Shard(0), R], None, """\
[0, 3], dp=Shard(dim=0), tp=Replicate()
no rank holds an element"""),
    "two dims of four": ((2, 5, 3, 4), (2, 2, 2), [Shard(3), R, Shard(1)], None, """\
[2, 5, 3, 4], dp=Shard(dim=3), cp=Replicate(), tp=Shard(dim=1)
rows: dim 1, columns: dim 3; whole and not drawn: dim 0, 2
      0:2   2:4
    ┌─────┬─────┐
0:3 │ 0,2 │ 4,6 │
    ├─────┼─────┤
3:5 │ 1,3 │ 5,7 │
    └─────┴─────┘"""),
    "three dims": ((3, 4, 4), (2, 2, 2), [Shard(2), Shard(1), Shard(0)], None, """\
[3, 4, 4], dp=Shard(dim=2), cp=Shard(dim=1), tp=Shard(dim=0)
rows: dim 1, columns: dim 2
dim 0 at 0:2
      0:2   2:4
    ┌─────┬─────┐
0:2 │  0  │  4  │
    ├─────┼─────┤
2:4 │  2  │  6  │
    └─────┴─────┘
dim 0 at 2:3
      0:2   2:4
    ┌─────┬─────┐
0:2 │  1  │  5  │
    ├─────┼─────┤
2:4 │  3  │  7  │
    └─────┴─────┘"""),
}


@pytest.mark.parametrize("name", CASES)
def test_text(name):
    *arguments, wanted = CASES[name]
    assert str(picture(*arguments)) == wanted


def test_large_meshes_are_elided():
    lines = str(picture((300,), (256, 256), [Shard(0), P])).split("\n")
    assert lines[1].split() == ["0:2", "2:4", "4:6", "6:8", "8:10", "10:12", "…", "298:300"]
    cells = [cell.strip() for cell in lines[3].split("│")[1:-1]]
    assert cells[0] == "0+1+2+…+255" and cells[-2:] == ["…", "38144+38145+38146+…+38399"]
    assert lines[5] == "holds nothing: 38400-65535"
    lines = str(picture((4,), (256, 256), [R, Shard(0)])).split("\n")
    assert [cell.strip() for cell in lines[3].split("│")[1:-1]][0] == "0,256,512,…,65280"
    tall = str(picture((64, 64), (64,), [Shard(0)])).split("\n")
    assert tall[-4].split() == ["…", "│", "…", "│"] and tall[-2].split()[0] == "63:64"


def test_svg_follows_the_sizes():
    svg = picture((5, 30), (2, 2), [Shard(0), Shard(1)]).svg
    cells = [element.attrib for element in ET.fromstring(svg).iter(f"{SVG}rect")][1:]
    assert [element.text for element in ET.fromstring(svg).iter(f"{SVG}text")] == [
        "[5, 30], dp=Shard(dim=0), tp=Shard(dim=1)", "rows: dim 0, columns: dim 1",
        "0:15", "15:30", "0:3", "0", "1", "3:5", "2", "3"]
    assert [float(cell["width"]) for cell in cells] == [150] * 4
    assert len({cell["fill"] for cell in cells}) == 4
    svg = picture((9, 6), (4,), [Shard(0)]).svg
    heights = [float(element.get("height")) for element in ET.fromstring(svg).iter(f"{SVG}rect")]
    assert heights[1:] == [100, 100, 100]


def test_a_plain_tensor():
    with pytest.raises(TypeError, match="draws a DTensor, but got a Tensor; make one with"):
        visualize_sharding(torch.ones(2))
