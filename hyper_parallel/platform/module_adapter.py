"""What the library needs from a framework's modules: the layers that models are made of."""
from abc import ABC, abstractmethod
from typing import Any, Callable, Iterator, Optional

BeforeForward = Callable[[Any, tuple, dict], tuple[tuple, dict]]
AfterForward = Callable[[Any, tuple, Any], Any]


class ModuleAdapter(ABC):
    """The part of a platform that knows modules."""

    Module: type
    """The framework's class of modules."""

    @staticmethod
    @abstractmethod
    def layer_kind(module: Any) -> Optional[str]:
        """``"linear"`` or ``"embedding"`` for such a layer, None for any other module."""

    @staticmethod
    @abstractmethod
    def obstacle_to_splitting(module: Any) -> Optional[str]:
        """Why a linear or embedding layer cannot be split, and the way out; None if it can."""

    @staticmethod
    @abstractmethod
    def named_modules(module: Any) -> Iterator[tuple[str, Any]]:
        """Each module inside ``module``, itself included (path ``""``), under all its paths."""

    @staticmethod
    @abstractmethod
    def own_parameters(module: Any) -> dict[str, Any]:
        """The parameters that ``module`` itself holds, by name, without those of its children."""

    @staticmethod
    @abstractmethod
    def replace_parameter(module: Any, name: str, value: Any) -> Any:
        """Put ``value`` in the place of a module's own parameter.

        Args:
            module: the module.
            name: name of the parameter there.
            value: a tensor, which becomes a parameter that needs a gradient where the old one
                did and has the attributes that users set on the old one; or a parameter, which
                is put in as it is.

        Returns:
            The parameter that the module holds now.
        """

    @staticmethod
    @abstractmethod
    def wrap_forward(module: Any, before: Optional[BeforeForward],
                     after: Optional[AfterForward]) -> None:
        """Change what the forward of ``module`` is given and what comes out of it.

        Hooks that the module has already stay outside: they see what the caller sees.

        Args:
            module: the module.
            before: called as ``before(module, args, kwargs)``; returns both anew.
            after: called as ``after(module, args, output)``; returns the output anew.
        """

    @staticmethod
    @abstractmethod
    def watch_interrupted_calls(callback: Callable[[Any], None]) -> Callable[[], None]:
        """Call ``callback(module)`` when a module's call ends by what is no ``Exception``.

        Hooks that run after every call do not run then.

        Returns:
            What ends it. The last one to end leaves nothing behind.
        """
