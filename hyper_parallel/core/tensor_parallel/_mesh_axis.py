"""The one mesh axis that a module is spread or replicated over."""
from __future__ import annotations

from typing import Any

from hyper_parallel.core.device_mesh import DeviceMesh


def check_axis(mesh: Any, caller: str, what: str, usual: int) -> None:
    """Refuse what is no mesh of one axis that this rank is in.

    Args:
        mesh: what the caller was given.
        caller: its name, for the message.
        what: what it does over the axis, for the message.
        usual: position of the axis that a message proposes, where the mesh has several.

    Raises:
        TypeError: it is no mesh.
        ValueError: it has several axes, or no place for this rank.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{caller} needs a DeviceMesh of hyper_parallel, but got "
                        f"{mesh!r} ({type(mesh).__name__}); make one with init_device_mesh.")
    if mesh.ndim != 1:
        raise ValueError(f"{what} over one axis, but the mesh has the axes "
                         f"{mesh.alias_name}; pass one, as in mesh[{mesh.alias_name[usual]!r}].")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {mesh.rank} is not in {mesh!r} and so has no part in the model; "
                         "guard the call with `if mesh.get_coordinate() is not None`.")
