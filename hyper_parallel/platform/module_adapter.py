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
        """What a layer computes, None for a module that is no such layer.

        ``"linear"`` has a weight of shape (outputs, inputs), ``"transposed_linear"`` one of
        (inputs, outputs), ``"embedding"`` one of (rows, columns).
        """

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
    def named_parameters(module: Any) -> Iterator[tuple[str, Any]]:
        """Each parameter in ``module`` once, by the first of its paths."""

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
    def own_buffers(module: Any) -> dict[str, Any]:
        """The buffers that ``module`` itself holds, by name, without those of its children.

        Raises:
            NotImplementedError: the framework's modules have none.
        """
        raise NotImplementedError(f"modules have no buffers here ({type(module).__name__})")

    @staticmethod
    def replace_buffer(module: Any, name: str, value: Any) -> None:
        """Put the tensor ``value`` in the place of a module's own buffer.

        Raises:
            NotImplementedError: the framework's modules have none.
        """
        raise NotImplementedError(f"modules have no buffers here ({name}, {type(value).__name__})")

    @staticmethod
    @abstractmethod
    def wrap_forward(module: Any, before: Optional[BeforeForward],
                     after: Optional[AfterForward]) -> None:
        """Change what the forward of ``module`` is given and what comes out of it.

        Hooks that the module has already stay outside: they see what the caller sees. Of several
        wraps the first one's functions are called first, as hooks are.

        Args:
            module: the module.
            before: called as ``before(module, args, kwargs)``; returns both anew.
            after: called as ``after(module, args, output)``; returns the output anew.
        """

    @staticmethod
    def unwrap_forward(module: Any) -> None:
        """Take away all that :meth:`wrap_forward` put around the forward of ``module``.

        Raises:
            NotImplementedError: the platform cannot.
        """
        raise NotImplementedError(
            f"this platform cannot undo wrap_forward on a {type(module).__name__}; make the module "
            "again")

    @staticmethod
    @abstractmethod
    def watch_interrupted_calls(callback: Callable[[Any], None]) -> Callable[[], None]:
        """Call ``callback(module)`` when a module's call ends by what is no ``Exception``.

        Hooks that run after every call do not run then.

        Returns:
            What ends it. The last one to end leaves nothing behind.
        """
