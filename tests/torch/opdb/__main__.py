"""``python -m tests.torch.opdb``: every operator of PyTorch's test database on two ranks."""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.torch.opdb.crew import Trial, verdicts
from tests.torch.opdb.database import Entry, entries
from tests.torch.opdb.libraries import Ours, Theirs
from tests.torch.opdb.report import gathered, rest, table
from tests.torch.opdb.trial import EXCLUDED, RIGHT, WRONG, Verdict


def main() -> int:
    """Run the database; 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--baseline", action="store_true", help="PyTorch's own DTensor instead")
    parser.add_argument("--samples", type=int, default=6, help="samples tried of each operator")
    parser.add_argument("--only", default="", help="a regular expression for names of operators")
    parser.add_argument("--json", type=Path, help="where to write the verdicts")
    options = parser.parse_args()
    chosen = [entry for entry in entries(options.samples) if re.search(options.only, entry.name)]
    library = Theirs.name if options.baseline else Ours.name
    start = time.monotonic()
    operators = gathered(chosen, _shown(verdicts(chosen, library), chosen))
    if options.json:
        options.json.write_text(json.dumps({
            "samples": options.samples,
            "operators": {name: asdict(one) for name, one in operators.items()}}, indent=1))
    print(table(operators))
    for (kind, note), names in sorted(rest(operators).items()):
        print(f"{kind}: {note}")
        for name, layouts in names.items():
            print(f"    {name}: {', '.join(layouts)}")
    print(f"{time.monotonic() - start:.0f} s")
    return int(any(kind == WRONG for kind, _ in rest(operators)))


def _shown(trials: Iterator[tuple[Trial, Verdict]], chosen: Sequence[Entry]
           ) -> Iterator[tuple[Trial, Verdict]]:
    """The trials as they come; those that are not right are told at once."""
    for trial, verdict in trials:
        if verdict.kind not in (RIGHT, EXCLUDED):
            print(f"{trial.entry + 1}/{len(chosen)} {chosen[trial.entry].name} {trial.number} "
                  f"{trial.layout} {verdict.kind}: {verdict.note}", file=sys.stderr, flush=True)
        yield trial, verdict


if __name__ == "__main__":
    sys.exit(main())
