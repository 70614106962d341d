"""From the verdicts of single trials to a table of operators."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.torch.opdb.crew import Trial
from tests.torch.opdb.database import Entry
from tests.torch.opdb.trial import EXCLUDED, LAYOUTS, ORDER, PLAIN, RIGHT, Verdict

RANDOM = "draws random numbers"


@dataclass
class Operator:
    """What is known of one operator: its verdict in each layout, and why it is not compared."""

    name: str
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    excluded: str = ""

    def add(self, layout: str, verdict: Verdict) -> None:
        """Take in one trial; the worst of a layout counts."""
        if verdict.kind == EXCLUDED:
            if not self.verdicts or verdict.note == RANDOM:
                self.excluded = verdict.note
            return
        if self.excluded != RANDOM:
            self.excluded = ""
        known = self.verdicts.get(layout, verdict)
        worst = max(known, verdict, key=lambda one: (ORDER.index(one.kind), one.note))
        self.verdicts[layout] = Verdict(worst.kind, worst.note, max(known.gathers, verdict.gathers))


def gathered(entries: Sequence[Entry], trials: Iterable[tuple[Trial, Verdict]]
             ) -> dict[str, Operator]:
    """The operators by name, in the order of the entries."""
    operators = {entry.name: Operator(entry.name) for entry in entries}
    for trial, verdict in trials:
        operators[entries[trial.entry].name].add(trial.layout, verdict)
    return operators


def compared(operators: Mapping[str, Operator]) -> list[Operator]:
    """The operators that are deterministic and take tensors."""
    return [operator for operator in operators.values() if not operator.excluded]


def counts(operators: Mapping[str, Operator]) -> dict[str, Counter]:
    """Number of operators of each kind of verdict, by layout."""
    found: dict[str, Counter] = {layout: Counter() for layout in LAYOUTS}
    for operator in compared(operators):
        for layout, verdict in operator.verdicts.items():
            found[layout][verdict.kind] += 1
            found[layout][PLAIN] += verdict.note == PLAIN
    return found


def table(operators: Mapping[str, Operator]) -> str:
    """The numbers by layout, as a table in Markdown."""
    lines = ["| inputs | compared | right | refused | crashed | wrong |",
             "| --- | --- | --- | --- | --- | --- |"]
    for layout, count in counts(operators).items():
        total = sum(count[kind] for kind in ORDER)
        share = 100 * count[RIGHT] / max(total, 1)
        numbers = " | ".join(str(count[kind]) for kind in ORDER[2:])
        lines.append(f"| {layout} | {total} | {count[RIGHT]} ({share:.1f} %) | {numbers} |")
    return "\n".join(lines)


def rest(operators: Mapping[str, Operator]) -> dict[tuple[str, str], dict[str, list[str]]]:
    """The operators that are not right: by verdict and note, each with the layouts."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for operator in compared(operators):
        for layout, verdict in operator.verdicts.items():
            if verdict.kind != RIGHT or verdict.note:
                names = found.setdefault((verdict.kind, verdict.note), {})
                names.setdefault(operator.name, []).append(layout)
    return found


def left_out(operators: Mapping[str, Operator]) -> dict[str, list[str]]:
    """The operators that are not compared, by the reason."""
    found: dict[str, list[str]] = {}
    for operator in operators.values():
        if operator.excluded:
            found.setdefault(operator.excluded, []).append(operator.name)
    return found
