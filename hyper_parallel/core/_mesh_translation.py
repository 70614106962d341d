"""The part of a device mesh that converts it from and to PyTorch's own."""
from typing import Any, Callable, Optional

from hyper_parallel.core._mesh_picture import PicturedMesh
from hyper_parallel.platform import get_platform


class TranslatedMesh(PicturedMesh):
    """A mesh with a counterpart in PyTorch.

    Attributes:
        get_group: gives the process group along an axis.
    """

    get_group: Callable[..., Any]
    _of_ranks: Callable[..., "TranslatedMesh"]
    _native_mesh: Optional[Any] = None

    @classmethod
    def from_torch(cls, mesh: Any) -> "TranslatedMesh":
        """The mesh of a ``torch.distributed.device_mesh.DeviceMesh``.

        Its process groups are used where none of the same ranks was made here before. Axes
        without names are called ``"dim0"``, ``"dim1"``, ... Nothing is sent.

        Raises:
            TypeError: ``mesh`` is another thing.
        """
        ranks, names = get_platform().read_native_mesh(mesh)
        names = names or tuple(f"dim{axis}" for axis in range(ranks.ndim))
        return cls._of_ranks(ranks.astype("int32"), tuple(names))

    def to_torch(self) -> Any:
        """The ``torch.distributed.device_mesh.DeviceMesh`` of the same ranks, names and groups.

        All ranks of the mesh have to call it, since groups that were not used yet are made.

        Raises:
            ValueError: ranks in another than ascending order along an axis, which PyTorch does
                not keep; or this process is not in the mesh.
        """
        if self._native_mesh is None:
            groups = [self.get_group(name) for name in self.alias_name]
            self._native_mesh = get_platform().build_native_mesh(
                self._ranks, self.alias_name, groups)
        return self._native_mesh
