"""Commands for trace files: ``python -m hyper_parallel.debug --help``."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hyper_parallel.core.dtensor.debug import CommTrace
from hyper_parallel.core.dtensor.debug._colour import print_table
from hyper_parallel.debug._compare import check_traces, diff_traces

_EXITS = "exit status: 0 all is well, 1 the traces differ, 2 a wrong call or an unreadable file"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the words after the program's name; None takes the process' own.

    Returns:
        The exit status: 0, 1 where traces differ, 2 where a file cannot be read.
    """
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except (OSError, ValueError) as error:
        print(f"hyper_parallel.debug: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hyper_parallel.debug", epilog=_EXITS,
        description="Shows and compares the traces that CommDebugMode.generate_json_dump writes.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    show = commands.add_parser("show", help="print the tree and a summary", epilog=_EXITS)
    show.add_argument("trace", metavar="TRACE")
    show.add_argument("--level", type=int, help="noise level, by default that of the file")
    show.add_argument("--by", default="type", help="keys of the summary, with commas between: "
                      "type, axis, module, op, phase, dtype")
    show.set_defaults(command=_show)

    chrome = commands.add_parser("chrome", help="write a timeline for ui.perfetto.dev",
                                 epilog=_EXITS)
    chrome.add_argument("trace", metavar="TRACE")
    chrome.add_argument("-o", "--output", required=True)
    chrome.set_defaults(command=_chrome)

    html = commands.add_parser("html", help="write a page for a browser", epilog=_EXITS)
    html.add_argument("trace", metavar="TRACE")
    html.add_argument("-o", "--output", required=True)
    html.set_defaults(command=_html)

    diff = commands.add_parser("diff", help="what one run sends and another does not",
                               epilog=_EXITS)
    diff.add_argument("before", metavar="A")
    diff.add_argument("after", metavar="B")
    diff.set_defaults(command=_diff)

    check = commands.add_parser("check", help="whether the ranks of one run do the same",
                                epilog=_EXITS)
    check.add_argument("traces", nargs="+", metavar="TRACE", help="one file of each rank")
    check.set_defaults(command=_check)
    return parser


def _show(options: argparse.Namespace) -> int:
    trace = CommTrace.load(options.trace)
    level = trace.noise_level if options.level is None else options.level
    keys = options.by.split(",")
    summary = trace.generate_comm_summary_table(keys[0] if len(keys) == 1 else keys)
    trace.print_comm_debug_tracing_table(level)
    print()
    print_table(summary, sys.stdout)
    return 0


def _chrome(options: argparse.Namespace) -> int:
    CommTrace.load(options.trace).generate_chrome_trace(options.output)
    return 0


def _html(options: argparse.Namespace) -> int:
    CommTrace.load(options.trace).generate_html(options.output)
    return 0


def _diff(options: argparse.Namespace) -> int:
    lines = diff_traces(CommTrace.load(options.before), CommTrace.load(options.after))
    for line in lines:
        print(line)
    return 1 if lines else 0


def _check(options: argparse.Namespace) -> int:
    fault = check_traces([CommTrace.load(path) for path in options.traces])
    if fault is not None:
        print(fault)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
