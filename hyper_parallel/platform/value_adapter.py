"""What the library needs of a framework to compare the values of two runs, or of two ranks."""
from abc import ABC, abstractmethod
from typing import Any, Callable, Optional


class ValueAdapter(ABC):
    """The part of a platform that looks at values without a trace of having looked."""

    @staticmethod
    @abstractmethod
    def fingerprint(tensor: Any) -> Optional[tuple[float, int]]:
        """A few bytes that stand for the values of this rank's part of ``tensor``.

        Any element type will do, and an empty tensor. It reads the memory once or twice and waits
        for the device; it records no gradient, draws no random number, and no mode of the
        framework sees it.

        Returns:
            The Euclidean norm, summed in double precision; and 64 bits in which each eight bytes
            of memory, multiplied by an odd number that tells their place, are combined by
            exclusive or. Equal bits give equal numbers, also of nan. None where ``tensor`` holds
            no data (meta or fake) or holds it in another form than a strided one.
        """

    @staticmethod
    @abstractmethod
    def when_waited(work: Any, callback: Callable[[], None]) -> Any:
        """A handle to use in place of ``work``, which calls back once its ``wait`` returned.

        Nothing else about the collective changes; ``callback`` is called once, on the thread that
        waits.
        """
