"""Operators with inputs, for the comparison with the dense operator in every layout."""

from collections.abc import Sequence

from tests.torch.shard.tables.blocks import BLOCKS
from tests.torch.shard.tables.composite import COMPOSITE
from tests.torch.shard.tables.entries import Entry
from tests.torch.shard.tables.in_place import IN_PLACE
from tests.torch.shard.tables.indexing import INDEXING
from tests.torch.shard.tables.loss import LOSS
from tests.torch.shard.tables.matmul import MATMUL
from tests.torch.shard.tables.normalization import NORMALIZATION
from tests.torch.shard.tables.pointwise import POINTWISE
from tests.torch.shard.tables.reduction import REDUCTION
from tests.torch.shard.tables.scatter import SCATTER
from tests.torch.shard.tables.view import VIEW

TABLES: dict[str, Sequence[Entry]] = {
    "pointwise": POINTWISE, "in_place": IN_PLACE, "reduction": REDUCTION, "view": VIEW,
    "indexing": INDEXING, "matmul": MATMUL, "normalization": NORMALIZATION, "loss": LOSS,
    "composite": COMPOSITE, "blocks": BLOCKS, "scatter": SCATTER,
}
