"""Pictures of meshes, to the character."""
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from hyper_parallel import init_device_mesh
from tests.ut.core.mesh_world import World, cube

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    """What an SVG document shows."""
    return [element.text for element in ET.fromstring(svg).iter(f"{SVG}text")]


def test_one_axis(world: World) -> None:
    world.rank = 2
    assert str(init_device_mesh((4,), ("tp",)).visualize()) == """\
DeviceMesh(tp=4), 4 ranks; rank 2 is at (2,)
  tp 0   tp 1   tp 2   tp 3
┌──────┬──────┬──────┬──────┐
│  0   │  1   │ [2]  │  3   │
└──────┴──────┴──────┴──────┘"""


def test_two_axes_in_another_order(world: World) -> None:
    world.rank = 1
    mesh = init_device_mesh((2, 3), ("dp", "tensor"), rank_list=(3, 1, 12, 0, 5, 4))
    assert str(mesh.visualize()) == """\
DeviceMesh(dp=2, tensor=3), 6 ranks; rank 1 is at (0, 1)
       tensor 0   tensor 1   tensor 2
     ┌──────────┬──────────┬──────────┐
dp 0 │    3     │   [1]    │    12    │
     ├──────────┼──────────┼──────────┤
dp 1 │    0     │    5     │    4     │
     └──────────┴──────────┴──────────┘"""


def test_three_axes(world: World) -> None:
    world.rank = 6
    assert str(cube().visualize()) == """\
DeviceMesh(dp=2, cp=2, tp=2), 8 ranks; rank 6 is at (1, 1, 0)
dp 0
       tp 0   tp 1
     ┌──────┬──────┐
cp 0 │  0   │  1   │
     ├──────┼──────┤
cp 1 │  2   │  3   │
     └──────┴──────┘
dp 1
       tp 0   tp 1
     ┌──────┬──────┐
cp 0 │  4   │  5   │
     ├──────┼──────┤
cp 1 │ [6]  │  7   │
     └──────┴──────┘"""


def test_a_sub_mesh_and_a_rank_outside(world: World) -> None:
    world.rank = 5
    assert str(cube()["dp", "cp"].visualize()).startswith(
        "DeviceMesh(dp=2, cp=2), 4 ranks; rank 5 is at (1, 0)\n")
    picture = init_device_mesh((2,), ("tp",)).visualize()
    assert str(picture).startswith("DeviceMesh(tp=2), 2 ranks; rank 5 is not in it\n")
    assert "[" not in str(picture)
    assert world.made == []


def test_large_meshes_are_elided(world: World) -> None:
    world.rank = 65535
    lines = str(init_device_mesh((256, 256), ("dp", "tp")).visualize()).split("\n")
    assert len(lines) == 23
    assert lines[0] == "DeviceMesh(dp=256, tp=256), 65,536 ranks; rank 65535 is at (255, 255)"
    assert [cell.strip() for cell in lines[3].split("│")] == [
        "dp 0", *map(str, range(8)), "…", "255", ""]
    assert [cell.strip() for cell in lines[-4].split("│")] == ["…"] * 11 + [""]
    assert [cell.strip() for cell in lines[-2].split("│")] == [
        "dp 255", *map(str, range(65280, 65288)), "…", "[65535]", ""]
    many = str(init_device_mesh((16, 16, 4, 4), ("pp", "dp", "cp", "tp")).visualize()).split("\n")
    assert [line for line in many if line.startswith(("pp", "…"))] == [
        "pp 0, dp 0", "pp 0, dp 1", "pp 0, dp 2", "pp 0, dp 3", "… 251 more", "pp 15, dp 15"]


def test_svg(world: World, tmp_path: Path) -> None:
    world.rank = 3
    picture = init_device_mesh((2, 2), ("<d&p>", "tp")).visualize()
    assert texts(picture.svg) == [
        "DeviceMesh(<d&p>=2, tp=2), 4 ranks; rank 3 is at (1, 1)", "tp 0", "tp 1",
        "<d&p> 0", "0", "1", "<d&p> 1", "2", "[3]"]
    cells = [element.attrib for element in ET.fromstring(picture.svg).iter(f"{SVG}rect")][1:]
    assert len(cells) == 4 and len({cell["fill"] for cell in cells[:3]}) == 1
    assert cells[3]["fill"] != cells[0]["fill"]  # one's own
    assert len({(cell["x"], cell["y"]) for cell in cells}) == 4
    assert picture._repr_svg_() == picture.svg
    picture.save(tmp_path / "mesh.svg")
    assert (tmp_path / "mesh.svg").read_text("utf-8") == picture.svg
    picture.save(str(tmp_path / "mesh.txt"))
    assert (tmp_path / "mesh.txt").read_text("utf-8") == f"{picture!r}\n"


def test_a_file_of_another_kind(world: World, tmp_path: Path) -> None:
    assert world.rank == 0
    with pytest.raises(ValueError, match=r"saved as \.svg or \.txt, but got .*mesh\.png"):
        init_device_mesh((2,), ("tp",)).visualize().save(tmp_path / "mesh.png")
    assert list(tmp_path.iterdir()) == []
