"""Brings a text of every rank to rank 0, on the default group's board.

No collective is used: none would be recorded, none needs the backend's device, and a rank that
does not come costs the others no more than the time they are willing to wait.
"""
from __future__ import annotations

import base64
import itertools
import time
import zlib

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.traffic_adapter import Board

platform = get_platform()

_PIECE = 2 ** 20  # characters of one note
_PAUSE = 0.01  # seconds between two looks at the board
_NOTHING = "nothing"

_calls = itertools.count()


def gather_texts(text: str | None, timeout: float) -> list[str] | None:
    """The texts of all ranks in their order on rank 0, None on the others.

    Every rank of the default group calls this, as often as the others. Only rank 0 waits.

    Args:
        text: this rank's text; None where it has none.
        timeout: seconds that rank 0 waits for the others.

    Raises:
        RuntimeError: a rank has no text, or has not sent it in time (on rank 0, which names it);
            this rank has none, or comes after rank 0 has given up (on the rank itself).
    """
    call = next(_calls)
    rank, size = platform.get_rank(), platform.get_world_size()
    board = platform.board_of(None) if size > 1 and platform.is_initialized() else None
    if rank != 0 and board is not None:
        _send(board, f"gather/{call}/", rank, text)
    others = {} if rank or board is None else _receive(board, f"gather/{call}/", size, timeout)
    if text is None:
        raise RuntimeError(f"rank {rank} has nothing to gather: its mode was never entered.")
    if rank != 0:
        return None
    lacking = [one for one, sent in others.items() if sent is None]
    if lacking:
        raise RuntimeError(f"there is nothing to gather from {_named(lacking)}: the mode was never "
                           "entered there; enter it on every rank.")
    return [text, *others.values()]


def _send(board: Board, prefix: str, rank: int, text: str | None) -> None:
    if board.read([f"{prefix}closed"]) is not None:
        raise RuntimeError(f"rank {rank} came to gather after rank 0 had given up waiting; call it "
                           "at the same place on every rank, or with a longer timeout there.")
    if text is None:
        board.write(f"{prefix}{rank}/number", _NOTHING)
        return
    packed = base64.b64encode(zlib.compress(text.encode())).decode()
    pieces = [packed[start:start + _PIECE] for start in range(0, len(packed), _PIECE)]
    for index, piece in enumerate(pieces):
        board.write(f"{prefix}{rank}/{index}", piece)
    # Last, so that whoever reads it finds the pieces.
    board.write(f"{prefix}{rank}/number", str(len(pieces)))


def _receive(board: Board, prefix: str, size: int, timeout: float) -> dict[int, str | None]:
    deadline = time.monotonic() + timeout
    keys = {rank: f"{prefix}{rank}/number" for rank in range(1, size)}
    while (numbers := board.read(list(keys.values()))) is None:
        if time.monotonic() > deadline:
            board.write(f"{prefix}closed", "")
            missing = [rank for rank, key in keys.items() if board.read([key]) is None]
            raise RuntimeError(f"{_named(missing)} sent no trace within {timeout:g} s; every rank "
                               "of the default group calls gather() once.")
        time.sleep(_PAUSE)
    board.erase(list(keys.values()))
    return {rank: None if number == _NOTHING else _text(board, prefix, rank, int(number))
            for rank, number in zip(keys, numbers)}


def _text(board: Board, prefix: str, rank: int, number: int) -> str:
    keys = [f"{prefix}{rank}/{index}" for index in range(number)]
    pieces = board.read(keys)
    if pieces is None:
        raise RuntimeError(f"what rank {rank} sent is gone from the store of the default group; "
                           "gather before the group is destroyed.")
    board.erase(keys)
    return zlib.decompress(base64.b64decode("".join(pieces))).decode()


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
