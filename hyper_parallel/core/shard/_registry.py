"""The table of sharding rules, by operator name.

A rule maker is given a ``Call`` and returns a ``Rule``, a ``Decomposition``, or None when this
call has no rule, and then the operator runs on replicated operands.
"""
from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence, Union

from hyper_parallel.core.shard._rule import (
    Call, Decomposition, Rule, factor_names, rule_from_notation)
from hyper_parallel.platform import get_platform

RuleMaker = Callable[[Call], Union[Rule, Decomposition, None]]

_makers: dict[str, RuleMaker] = {}
# Rules of autograd Functions, by their class: a name may be that of an operator or another class.
_of_functions: dict[type, RuleMaker] = {}
# Names that a user wrote out, which autograd Functions go by as well.
_named_by_user: set[str] = set()
# Operators whose rule is the same whatever numbers are passed, so that a learning rate that
# changes every step does not miss the cache.
_number_blind: set[str] = set()
# Operators whose rule depends on the dtype of a tensor argument.
_by_dtype: set[str] = set()
# Operators that need every operand whole, and say so by their nature: no warning is due.
_whole_by_nature: set[str] = set()
# Operators without a rule that draw random numbers.
_random_by_nature: set[str] = set()
# Called whenever a rule comes or goes, so that no cache keeps an old one.
_listeners: list[Callable[[], None]] = []


def add_rule(names: Union[str, Iterable[str]], maker: RuleMaker, *, number_blind: bool = False,
             by_dtype: bool = False) -> None:
    """Enter a rule maker under one or several operator names (a str is split at spaces)."""
    for name in names.split() if isinstance(names, str) else names:
        _makers[name] = maker
        if number_blind:
            _number_blind.add(name)
        if by_dtype:
            _by_dtype.add(name)


def rule_for(names: str, **options: Any) -> Callable[[RuleMaker], RuleMaker]:
    """Decorator form of :func:`add_rule`."""

    def enter(maker: RuleMaker) -> RuleMaker:
        add_rule(names, maker, **options)
        return maker

    return enter


def add_notation(names: str, notation: str, parameters: Optional[Sequence[str]] = None,
                 **options: Any) -> None:
    """Enter a rule written in the notation.

    Args:
        names: operator names, separated by spaces.
        notation: ``"operands -> results"``.
        parameters: names of the operator's parameters up to the last tensor, in order.  The
            notation's operands are those of them that are tensors by their position here;
            write ``"-name"`` for a parameter that is not a tensor.
        options: fields of the rule.
    """
    add_rule(names, _notation_maker(notation, parameters, options))


def _notation_maker(notation: str, parameters: Optional[Sequence[str]], options: dict) -> RuleMaker:
    def maker(call: Call) -> Rule:
        order = call.in_declared_order() if call.declared else None
        if parameters is not None:
            order = [call.operand(position, name) for position, name in enumerate(parameters)
                     if not name.startswith("-")]
        rule_options = dict(options)
        if "terms" in rule_options:
            rule_options["terms"] = _present_terms(rule_options["terms"], order, len(call.specs))
        return rule_from_notation(notation, call.shapes, order, **rule_options)

    return maker


def _present_terms(terms: Sequence[Sequence[int]], order: Optional[Sequence[Optional[int]]],
                   count: int) -> tuple[tuple[int, ...], ...]:
    """The terms with notation operands replaced by operand indices, absent ones left out."""
    if order is None:
        order = list(range(count))
    present = [tuple(order[index] for index in term if index < len(order)) for term in terms]
    return tuple(term for term in present if term and None not in term)


def register_rule(operator: Union[str, Callable], rule: Union[str, RuleMaker, None],
                  **options: Any) -> None:
    """Give a function of your own a sharding rule.

    Args:
        operator: the function as it is called - a custom operator such as
            ``torch.ops.mylib.scale``, or the ``apply`` of an autograd Function - or its name.
        rule: the notation, such as ``"... d, d -> ... d"``, whose operands are the tensor
            arguments, those of a custom operator in the order of its parameters, of others in the
            order in which they are passed. The results are those that the operator returns, and
            then the arguments that it declares to write to. Or a function from a ``Call`` to a
            ``Rule``; or None to take the rule away.
        options: with a notation, the fields of the rule: ``whole="d"`` for factors that the
            function must see whole, ``reduced={"i": "sum"}`` for those that it sums over,
            ``terms=((0,),)`` when it is linear in operand 0.

    Raises:
        TypeError: a rule of another type, or an option that rules do not have.
        ValueError: a notation that cannot be read, or an option that names no factor of it; when
            the operator is called, a notation that does not fit the arguments.
    """
    maker = rule
    if isinstance(rule, str):
        _check_options(rule, options)
        maker = _notation_maker(rule, None, options)
    if maker is not None and not callable(maker):
        raise TypeError("a rule is a notation such as '... d -> ... d', a function from a Call to "
                        f"a Rule, or None, but got {rule!r}.")
    name = operator if isinstance(operator, str) else get_platform().operator_name(operator)
    table: dict[Any, RuleMaker] = _makers
    key: Any = name
    if isinstance(operator, str):
        _named_by_user.add(name)
        for function in [each for each in _of_functions if each.__name__ == name]:
            del _of_functions[function]
    elif is_function(operator):
        table, key = _of_functions, operator.__self__
    if maker is None:
        table.pop(key, None)
    else:
        table[key] = maker
    for listener in _listeners:
        listener()


def _check_options(notation: str, options: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(Rule) if field.default is not MISSING
             or field.default_factory is not MISSING]
    for name in options:
        if name not in known:
            raise TypeError(f"a rule has no option {name!r}; its options are {', '.join(known)}.")
    names = factor_names(notation)
    for option in ("whole", "reduced"):
        given = options.get(option, ())
        for name in given.split() if isinstance(given, str) else given:
            if name not in names:
                raise ValueError(f"{option} names the factor {name!r}, which is not in "
                                 f"{notation!r}.")


def on_change(listener: Callable[[], None]) -> None:
    """Have ``listener`` called whenever a user registers a rule."""
    _listeners.append(listener)


def needs_whole(names: str) -> None:
    """Say that some operators read every element, so that replicating needs no warning."""
    _whole_by_nature.update(names.split())


def draws_random_numbers(names: str) -> None:
    """Say that some operators without a rule are random, so that all ranks draw the same."""
    _random_by_nature.update(names.split())


def is_function(func: Callable) -> bool:
    """Whether ``func`` is the ``apply`` of a user's autograd Function, whose name tells nothing."""
    return get_platform().without_override(func)


def find_maker(name: str, func: Optional[Callable] = None) -> Optional[RuleMaker]:
    """The rule maker of an operator, or None; ``func`` is what is called."""
    if func is None or not is_function(func):
        return _makers.get(name)
    return _of_functions.get(func.__self__) or (
        _makers.get(name) if name in _named_by_user else None)


def is_number_blind(name: str) -> bool:
    """Whether the values of number arguments do not matter to the rule."""
    return name in _number_blind


def is_by_dtype(name: str) -> bool:
    """Whether the dtypes of tensor arguments matter to the rule."""
    return name in _by_dtype


def is_random_by_nature(name: str) -> bool:
    """Whether an operator without a rule draws random numbers."""
    return name in _random_by_nature


def is_whole_by_nature(name: str) -> bool:
    """Whether running on replicated operands is no surprise."""
    return name in _whole_by_nature
