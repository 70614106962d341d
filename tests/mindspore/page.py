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
    """A row: what it is, and for each platform the tests that are of it alone.

    Attributes:
        title: the feature.
        torch, mindspore: pieces of the tests' names, with ``|`` between; an empty text for none.
        refusal, torch_has: what stands in the table in place of "yes"; without tests it has to.
    """

    title: str
    torch: str
    mindspore: str
    refusal: str = ""
    torch_has: str = ""


FEATURES = (
    Feature("meshes, groups of members alone, any rank order", "test_device_mesh[|test_groups[",
            "test_redistribution[test_groups_of_a_mesh"
            "|test_redistribution[test_the_order_of_the_ranks|test_collectives[test_groups"),
    Feature("collectives with gradients, 12 dtypes",
            "test_platform.test_collectives[|test_platform.test_gradients[",
            "test_collectives[test_every|test_collectives[test_shapes|test_collectives[test_inputs"
            "|test_collectives[test_gradients|test_collectives[test_second"),
    Feature("a rank that never comes: an error in bounded time", "test_missing_member[",
            "test_missing[test_a_member_that_never_comes"),
    Feature("`differentiable_all_to_all_single`", "test_collectives[test_all_to_all_single",
            "test_collectives[test_what_is_refused]", "its asynchronous form only"),
    Feature("redistribution of every pair of layouts, one and two axes", "test_redistribution[",
            "test_redistribution[test_every_pair|test_redistribution[test_what_moves"),
    Feature("uneven and empty shards", "test_parallelize[test_uneven|test_values[test_uneven",
            "test_redistribution[test_every_pair_on_one_axis]"),
    Feature("gradients of every pair", "test_autograd[", "test_redistribution[test_gradients"),
    Feature("operators, functions and layers", "test_operators[|test_functions[",
            "test_operators[test_values|test_operators[test_substitutes"
            "|test_operators[test_python_values|test_operators[test_what_an_operator_sends"),
    Feature("operators that gather: `pad`, `conv2d`, pooling, `flip`", "",
            "test_operators[test_operators_that_gather", "yes, they send (1)", "they do not"),
    Feature("in-place operators", "test_operators[test_in_place]", "test_operators[test_in_place]"),
    Feature("dropout that agrees between replicas",
            "test_random[test_dropout|test_random[test_attention",
            "test_operators[test_dropout"),
    Feature("`rand_like`, `randn_like`, `randint_like`, `bernoulli`",
            "test_random[test_replicas|test_random[test_shards|test_random[test_ranks",
            "test_operators[test_random_tensors"),
    Feature("DTensor parameters, stepped by the framework's optimizers", "test_training[",
            "test_mlp[test_training|test_mlp[test_parameters"),
    Feature("optimizers that take norms of parameters", "",
            "test_mlp[test_optimizers_of_whole_tensors_are_refused",
            "refused: `Lamb`, `LARS`, `AdaFactor`", "not tested"),
    Feature("`parallelize_module`", "test_parallelize[",
            "test_mlp[test_a_plan|test_mlp[test_training|test_redistribution[test_styles"),
    Feature("embeddings, by words and by features", "test_parallelize[test_embedding",
            "test_redistribution[test_styles_of_embeddings"),
    Feature("`SequenceParallel`, `PrepareModuleInput`, `PrepareModuleOutput`, both",
            "test_parallelize[test_sequence|test_styles[test_sequence|test_styles[test_boundaries",
            "test_redistribution[test_styles_of_sequences"),
    Feature("cross entropy of scores spread over the words, `loss_parallel`",
            "test_over_shards[test_cross_entropy",
            "test_redistribution[test_styles_of_losses"),
    Feature("`describe`, `unparallelize_module`, `auto_plan`",
            "test_styles[test_undone|test_styles[test_described|test_models[",
            "test_redistribution[test_styles_are_described"),
    Feature("checkpoints by the framework's own functions", "test_checkpoint[",
            "test_redistribution[test_checkpoints"),
    Feature("`CommDebugMode`: tables, JSON, modules, backward", "test_comm_debug_mode_mlp[",
            "test_mlp[test_comm_debug_mode"),
    Feature("`trace_native`", "test_native_calls[", "test_collectives[test_what_is_refused]",
            "refused: its own collectives cannot be watched"),
    Feature("`verify=\"online\"`, `gather()`", "test_verification[",
            "test_collectives[test_what_is_refused]",
            "refused: there is no store for notes between ranks"),
    Feature("`replicate`", "test_replicate[", "test_redistribution[test_what_modules_cannot_be",
            "refused: it does not tell when gradients are there"),
    Feature("the framework's own DTensor, there and back", "test_translation[",
            "test_redistribution[test_what_cannot_be_is_refused]", "it has none"),
    Feature("graph mode: `mindspore.jit`, `GRAPH_MODE`", "", "test_operators[test_graph_mode",
            "refused, wherever a DTensor is met", "it has none"),
)


def results(file: Path) -> dict[str, bool]:
    """Whether each test of a JUnit file passed, by its name; without those that were skipped."""
    return {f"{case.get('classname')}.{case.get('name')}":
            case.find("failure") is None and case.find("error") is None
            for case in ElementTree.parse(file).iter("testcase") if case.find("skipped") is None}


def verdict(found: dict[str, bool], pattern: str, refusal: str = "") -> str:
    """``yes`` and the number of tests, the refusal that they show, or what is wrong."""
    pieces = [piece for piece in pattern.split("|") if piece]
    for piece in pieces:
        if not any(piece in name for name in found):
            raise SystemExit(f"no test has {piece!r} in its name")
    passed = [outcome for name, outcome in found.items() if any(piece in name for piece in pieces)]
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
    lines += [f"| {feature.title} | {verdict(torch, feature.torch, feature.torch_has)} | "
              f"{verdict(mindspore, feature.mindspore, feature.refusal)} |"
              for feature in FEATURES]
    print(PAGE.read_text(encoding="utf-8").replace("@TABLE@", "\n".join(lines)), end="")


if __name__ == "__main__":
    main()
