"""Writes ``docs/platforms.md`` from the results of both platforms' tests: ``make platforms``.

A feature is supported where all tests that are named for it passed, and there are some. Where a
platform does not support it, the tests named show the error, whose words stand in the table.
"""

import argparse
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

PAGE = Path(__file__).with_name("platforms.md.in")


class Feature(NamedTuple):
    """A row: what it is, and for each platform a piece of its tests' names, or a refusal.

    Without a piece of a name, PyTorch has nothing of the kind.
    """

    title: str
    torch: str
    mindspore: str
    refusal: str = ""


FEATURES = (
    Feature("meshes, groups of members alone, any rank order", "test_device_mesh",
            "test_redistribution[test_groups_of_a_mesh]"),
    Feature("collectives with gradients, 12 dtypes", "test_platform.test_collectives[",
            "test_collectives["),
    Feature("`differentiable_all_to_all_single`", "test_platform.test_collectives[",
            "test_collectives[test_what_is_refused]", "its asynchronous form only"),
    Feature("redistribution of every pair of layouts, one and two axes", "test_redistribution[",
            "test_redistribution[test_every_pair"),
    Feature("uneven and empty shards", "test_redistribution[",
            "test_redistribution[test_every_pair_on_one_axis]"),
    Feature("gradients of every pair", "test_autograd[", "test_redistribution[test_gradients"),
    Feature("operators, functions and layers", "test_functions[", "test_operators["),
    Feature("in-place operators", "test_functions[", "test_operators[test_in_place]"),
    Feature("dropout that agrees between replicas", "test_random[", "test_operators[test_dropout"),
    Feature("DTensor parameters, stepped by the framework's optimizers", "test_training[",
            "test_mlp[test_training"),
    Feature("`parallelize_module`", "test_parallelize[", "test_mlp[test_"),
    Feature("`CommDebugMode`: tables, JSON, modules, backward", "test_comm_debug_mode_mlp[",
            "test_mlp[test_comm_debug_mode"),
    Feature("`trace_native`", "test_native_calls[", "test_collectives[test_what_is_refused]",
            "refused: its own collectives cannot be watched"),
    Feature("`verify=\"online\"`, `gather()`", "test_verification[",
            "test_collectives[test_what_is_refused]",
            "refused: there is no store for notes between ranks"),
    Feature("`replicate`", "test_replicate[", "test_collectives[test_what_is_refused]",
            "refused: it does not tell when gradients are there"),
    Feature("the framework's own DTensor, there and back", "test_translation[",
            "test_redistribution[test_what_cannot_be_is_refused]", "it has none"),
    Feature("graph mode: `mindspore.jit`, `GRAPH_MODE`", "", "test_operators[test_graph_mode",
            "refused, wherever a DTensor is met"),
)


def results(file: Path) -> dict[str, bool]:
    """Whether each test of a JUnit file passed, by its name; without those that were skipped."""
    return {f"{case.get('classname')}.{case.get('name')}":
            case.find("failure") is None and case.find("error") is None
            for case in ElementTree.parse(file).iter("testcase") if case.find("skipped") is None}


def verdict(found: dict[str, bool], pattern: str, refusal: str = "") -> str:
    """``yes`` and the number of tests, the refusal that they show, or what is wrong."""
    if not pattern:
        return "it has none"
    passed = [outcome for name, outcome in found.items() if pattern in name]
    if not passed:
        raise SystemExit(f"no test has {pattern!r} in its name")
    if not all(passed):
        return f"no: {passed.count(False)} of {len(passed)} tests fail"
    return refusal or f"yes ({len(passed)})"


def main() -> None:
    """Prints the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("torch", type=Path, help="JUnit file of the tests on PyTorch")
    parser.add_argument("mindspore", type=Path, help="JUnit file of tests/mindspore")
    options = parser.parse_args()
    torch, mindspore = results(options.torch), results(options.mindspore)
    lines = ["| | PyTorch | MindSpore |", "| --- | --- | --- |"]
    lines += [f"| {feature.title} | {verdict(torch, feature.torch)} | "
              f"{verdict(mindspore, feature.mindspore, feature.refusal)} |"
              for feature in FEATURES]
    print(PAGE.read_text(encoding="utf-8").replace("@TABLE@", "\n".join(lines)), end="")


if __name__ == "__main__":
    main()
