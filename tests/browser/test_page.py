"""The page of a trace, in a real browser: what it shows is what the trace says."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver

from hyper_parallel.core.dtensor.debug._call_records import (
    AnnotateCall, CollectiveCall, DebugCall, OpCall, RedistributeCall, TensorInfo)
from hyper_parallel.core.dtensor.debug._call_tree import CallTree
from hyper_parallel.core.placement_types import Replicate, Shard
from hyper_parallel.debug import CommTrace
from hyper_parallel.debug.__main__ import main
from tests.browser.browser import MISSING, Page, chromium
from tests.torch.launcher import Case, run_case

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

ALL_REDUCE = "differentiable_all_reduce"
ALL_GATHER = "differentiable_all_gather_concat"
NEXT_FRAME = ("return new Promise((done) => requestAnimationFrame(() => "
              "requestAnimationFrame(() => done())))")
HOSTILE = [
    "<img src=x onerror=\"window.hacked = 1\">",
    "</script><script>window.hacked = 2</script>",
    "<!-- <script>", "]]>", "{{script}}", "&lt;b&gt;", "line\u2028separator\u2029", "\ud800",
    "__proto__", "constructor", "\"quoted\" 'twice' \\", "tab\tand\nline", "\x1b[31m", "名",
    "javascript:window.hacked = 3", " ", "x" * 5000,
]


@pytest.fixture(name="driver", scope="module")
def _driver() -> Iterator[webdriver.Chrome]:
    with chromium() as driver:
        yield driver


@pytest.fixture(name="show")
def _show(driver: webdriver.Chrome, tmp_path: Path) -> Iterator[Callable[[Any], Page]]:
    """Opens a page or that of a trace, and checks at the end that it broke and loaded nothing."""
    opened = []

    def show(trace: CommTrace | Path) -> Page:
        if isinstance(trace, Path):
            file = trace
        else:
            file = tmp_path / "a page.html"
            trace.generate_html(file)
        opened.append(Page(driver, file))
        return opened[-1]

    yield show
    for page in opened:
        page.check()


@pytest.fixture(name="real", scope="module")
def _real(tmp_path_factory: pytest.TempPathFactory) -> CommTrace:
    """The trace of a transformer's step on four ranks."""
    folder = tmp_path_factory.mktemp("real")
    worker = folder / "_test_trace.py"
    worker.write_text(
        "from tests.browser.traced_transformer import write_trace\n\n\n"
        f"def test_trace() -> None:\n    write_trace({str(folder / 'trace')!r})\n")
    run_case(Case(worker, "test_trace", 4, timeout=120))
    return CommTrace.load(folder / "trace.json")


def collective(kind: str = ALL_REDUCE, **more: Any) -> CollectiveCall:
    """A collective over "tp" with 64 bytes on the wire."""
    values = {"group_size": 2, "input_shape": (4, 4), "output_shape": (4, 4), "wire_bytes": 64,
              "input_dtype": "torch.float32", "axis": "tp", "ranks": (0, 1), **more}
    return CollectiveCall(kind, **values)


def add(tree: CallTree, record: DebugCall, *inside: Any) -> None:
    """A record and what is inside it: collectives, or tuples of a record and what is inside."""
    tree.open(record, tree.innermost)
    for one in inside:
        if isinstance(one, tuple):
            add(tree, *one)
        else:
            tree.add_collective(one)
    tree.close(lambda other: other is record)


def module(name: str) -> AnnotateCall:
    """A module's boundary, as the recorder makes it."""
    return AnnotateCall(name, module=name)


def linear() -> OpCall:
    """An operator with two operands."""
    return OpCall("linear", [TensorInfo((4, 8), "torch.float32", True, (Shard(0),), (2,)),
                             TensorInfo((6, 8), "torch.float32")],
                  [TensorInfo((4, 6), "torch.float32", True, (Replicate(),), (2,))])


def small_trace(max_records: int | None = None) -> CommTrace:
    """Two layers: a's gradient is reduced; b gathers over "dp" and reduces over "tp"."""
    tree = CallTree(max_records)
    move = RedistributeCall((Shard(0),), (Replicate(),), (4, 8), "forward", ("dp",), "linear",
                            argument="0")
    add(tree, module("(root)"),
        (module("a"), (linear(), collective(phase="backward"))),
        (module("b"), (linear(), (move, collective(ALL_GATHER, axis="dp", wire_bytes=4096)),
                             collective())))
    return CommTrace(tree, 1, 4, 3)


def numbers(trace: CommTrace, key: str) -> dict[str, tuple[int, int]]:
    """Bytes and calls by the name that the page gives each group."""
    return {"none" if name is None else name.removeprefix("differentiable_"):
            (sums["wire_bytes"], sums["count"])
            for name, sums in trace.get_comm_summary(key).items()}


class TestReal:
    """A trace of real ranks."""

    def test_numbers_are_those_of_the_summary(self, real: CommTrace, show):
        page = show(real)
        assert real.get_total_counts() == 40
        assert page.text("#total-count") == "40"
        assert page.text("#total-records") == "185"
        assert page.text("#whose") == "Rank 0 of 4"
        for key in ("module", "axis", "type"):
            assert page.bars(key) == numbers(real, key)
        assert page.find("#total-bytes").find_element("xpath", "..").get_attribute("title") == \
            f"{sum(real.get_comm_bytes().values()):,} bytes on the wire, ring algorithm"

    def test_the_tree_adds_up(self, real: CommTrace, show):
        page = show(real)
        page.find("#fold-all").click()
        assert page.rows()[:2] == ["(root)", "Partial(avg) → Replicate()"]
        calls = [int(text) for text in page.texts("#tree .calls") if text]
        assert sum(calls) == 40
        sent = page.run(
            "return [...document.querySelectorAll('#tree .bytes')].map((one) => one.title)")
        assert sum(int(text.split()[0].replace(",", "")) for text in sent) == \
            sum(real.get_comm_bytes().values())

    def test_parameters(self, real: CommTrace, show):
        page = show(real)
        assert page.text("#parameter-count") == "40 of 40"
        page.find("#parameter-search").send_keys("0.attention.out")
        assert page.texts("#parameters tbody td") == [
            "blocks.0.attention.out.weight", "[64, 64]", "4,096", "float32", "Shard(dim=1)", "2",
            "yes"]

    def test_timeline_is_drawn_and_leads_to_the_tree(self, real: CommTrace, show):
        page = show(real)
        page.run("document.getElementById('zoom-in').click()")
        page.run("document.getElementById('zoom-all').click()")
        colours = page.run(
            "const c = document.getElementById('timeline');"
            "return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => {"
            "const { data } = c.getContext('2d').getImageData(0, 0, c.width, c.height);"
            "const seen = new Set();"
            "for (let k = 0; k < data.length; k += 4) if (data[k + 3] === 255)"
            " seen.add([data[k], data[k + 1], data[k + 2]].join());"
            "done([...seen]);})))")
        for colour in ("59,118,225", "224,133,43", "138,147,161", "195,207,226"):
            assert colour in colours  # forward, backward, outside, module
        page.find("#tree").click()
        page.press("END")
        assert page.text("#details-title") != "(root)"
        # The track of the outermost module, which is the first record, just behind the labels.
        page.run(
            "const c = document.getElementById('timeline');"
            "const { left, top } = c.getBoundingClientRect();"
            "const at = { bubbles: true, pointerId: 1, clientX: left + 106, clientY: top + 32 };"
            "c.setPointerCapture = () => {};"
            "c.dispatchEvent(new PointerEvent('pointermove', at));"
            "c.dispatchEvent(new PointerEvent('pointerdown', at));"
            "c.dispatchEvent(new PointerEvent('pointerup', at));")
        assert page.text("#details-title") == "(root)"
        assert page.text("#tip").startswith("(root)\n")


class TestTree:
    """Folding, searching and filtering."""

    def test_all_is_seen_at_first(self, show):
        assert show(small_trace()).rows() == [
            "(root)", "  a", "    linear", "      all_reduce", "  b", "    linear",
            "      Shard(dim=0) → Replicate()", "        all_gather_concat", "      all_reduce"]

    def test_fold(self, show):
        page = show(small_trace())
        page.fold("b")
        assert page.rows() == ["(root)", "  a", "    linear", "      all_reduce", "  b"]
        page.fold("a")
        assert page.rows() == ["(root)", "  a", "  b"]
        page.fold("b")
        assert page.rows()[2:5] == ["  b", "    linear", "      Shard(dim=0) → Replicate()"]
        page.find("#fold-all").click()
        assert page.rows() == ["(root)"]
        page.find("#unfold-all").click()
        assert len(page.rows()) == 9

    def test_keys(self, show):
        page = show(small_trace())
        page.find("#tree").click()  # its middle may be any row
        page.press("HOME", "ARROW_DOWN", "ARROW_LEFT")
        assert page.rows()[:3] == ["(root)", "  a", "  b"]
        page.press("ARROW_RIGHT")
        assert page.rows()[2] == "    linear"
        page.press("ARROW_RIGHT", "ARROW_RIGHT")
        assert page.text("#details-title") == "all_reduce"
        page.press(*["ARROW_LEFT"] * 6)  # to the operator, fold it, to a, fold it, ...
        assert page.rows() == ["(root)"]
        page.press("ENTER", "END")
        assert page.text("#details-title") == "all_reduce"
        chosen = page.find("#tree").get_attribute("aria-activedescendant")
        assert page.find(f"#{chosen}").get_attribute("aria-selected") == "true"

    def test_details(self, show):
        page = show(small_trace())
        page.find(".row.op .what").click()
        names, values = page.texts("#details dt"), page.texts("#details dd")
        facts = dict(zip(names, values))
        assert facts["inside"] == "(root) › a"
        assert facts["inputs"] == "[4, 8] float32 Shard(dim=0)\n[6, 8] float32 plain"
        assert facts["collectives inside"] == "1" and facts["bytes inside"] == "64"

    def test_search(self, show):
        page = show(small_trace())
        page.find("#search").send_keys("GATHER")
        assert page.rows() == ["(root)", "  b", "    linear", "      Shard(dim=0) → Replicate()",
                               "        all_gather_concat"]
        assert page.text("#matches") == "1 of 9 records"
        assert page.texts("#tree .calls")[0] == "1"
        page.press("ESCAPE")
        assert len(page.rows()) == 9 and page.text("#matches") == ""
        page.find("#search").send_keys("no such thing")
        assert page.rows() == [] and "Nothing matches" in page.text("#tree")

    def test_a_search_finds_what_is_inside(self, show):
        page = show(small_trace())
        page.find("#search").send_keys("b")  # only the module has it in its name
        page.press("BACKSPACE")
        page.find("#search").send_keys("shard(dim=0) → rep")
        assert page.rows()[-1] == "      Shard(dim=0) → Replicate()"
        page.fold("Shard(dim=0) → Replicate()")
        assert page.rows()[-1] == "        all_gather_concat"

    def test_filters(self, show):
        page = show(small_trace())
        page.chip("axis", "tp").click()
        assert page.rows() == ["(root)", "  a", "    linear", "      all_reduce", "  b",
                               "    linear", "      all_reduce"]
        assert page.bars("axis") == {"tp": (128, 2)}
        assert page.bars("module") == {"a": (64, 1), "b": (64, 1)}
        page.chip("phase", "backward").click()
        assert page.rows() == ["(root)", "  a", "    linear", "      all_reduce"]
        assert page.chip("phase", "backward").get_attribute("aria-pressed") == "true"
        page.chip("phase", "forward").click()  # two of one kind: either
        assert len(page.rows()) == 7
        page.chip("type", "all_gather_concat").click()
        assert page.rows() == [] and page.bars("axis") == {}
        for chip in (("axis", "tp"), ("phase", "forward"), ("phase", "backward")):
            page.chip(*chip).click()
        assert page.rows()[-1] == "        all_gather_concat"
        assert page.bars("type") == {"all_gather_concat": (4096, 1)}

    def test_folding_comes_back_after_a_search(self, show):
        page = show(small_trace())
        page.fold("b")
        before = page.rows()
        page.find("#search").send_keys("gather")
        assert "        all_gather_concat" in page.rows()
        page.press("ESCAPE")
        assert page.rows() == before

    def test_bars_filter(self, show):
        page = show(small_trace())
        page.find('#by-axis .bar[data-value="dp"]').click()
        assert page.bars("module") == {"b": (4096, 1)}
        page.find('#by-module .bar[data-value="b"]').click()
        assert page.find("#search").get_attribute("value") == "b"


class TestTraces:
    """Traces of every kind."""

    def test_empty(self, show):
        page = show(CommTrace(CallTree(), 0, 1, 3))
        assert page.rows() == [] and "Nothing was recorded." in page.text("#tree")
        assert page.text("#total-count") == "0" and page.bars("module") == {}

    def test_dropped_and_incomplete(self, show):
        trace = small_trace(max_records=4)
        trace._failure = "ValueError: <b>no</b>"
        page = show(trace)
        assert page.texts(".notice") == [
            "This trace is incomplete. Recording failed: ValueError: <b>no</b>",
            "5 records were dropped, since max_records was reached. Counts, bytes and bars "
            "include them; the tree and the timeline do not."]
        assert page.text("#total-count") == "3" and page.text("#total-records") == "4"
        assert page.bars("module") == numbers(trace, "module")

    def test_hostile_names(self, show):
        tree = CallTree()
        for name in HOSTILE:
            add(tree, module(name),
                (OpCall(name, [TensorInfo((1,), name)], []),
                 collective(name, axis=name, module=name, operator=name, call_site=name,
                            reduce_op=name, input_dtype=name)))
        trace = CommTrace(tree, 0, 2, 3)
        trace._failure = HOSTILE[0]
        trace._parameters = {name: {"shape": (2,), "dtype": name, "requires_grad": True,
                                    "is_dtensor": False, "placements": None, "mesh_shape": None}
                             for name in HOSTILE}
        page = show(trace)
        # Half a character is in no text that a page can send.
        shown = [name.replace("\ud800", "\ufffd") for name in HOSTILE]
        page.find("#unfold-all").click()
        page.run("document.getElementById('tree').style.height = '3000px';" + NEXT_FRAME)
        assert page.texts("#tree .module .what") == shown
        assert page.texts("#tree .op .what") == shown
        assert page.texts("#parameters td:first-child") == shown
        # Everything that can be clicked, and so everything that is drawn because of it.
        page.run("for (const one of document.querySelectorAll('#tree .what, .chip, .bar, button'))"
                 " one.click()")
        assert page.run("return [window.hacked, document.images.length, document.scripts.length,"
                        " document.querySelectorAll('main b b, main img').length]") == \
            [None, 0, 2, 0]

    def test_numbers_that_json_has_not(self, show):
        page = show(CommTrace(_tree_of(collective(argument=float("nan"), reduce_op=float("inf"))),
                              0, 1, 3))
        page.find(".row.collective .what").click()
        assert "nan" in page.texts("#details dd") and "inf" in page.texts("#details dd")

    def test_command(self, show, tmp_path: Path, driver: webdriver.Chrome):
        trace = small_trace()
        trace.generate_json_dump(tmp_path / "trace.json", noise_level=3)
        assert main(["html", str(tmp_path / "trace.json"), "-o", str(tmp_path / "out.html")]) == 0
        page = Page(driver, tmp_path / "out.html")
        rows = page.rows()
        page.check()
        assert rows == show(trace).rows() and len(rows) == 9


def _tree_of(*records: CollectiveCall) -> CallTree:
    tree = CallTree()
    for record in records:
        tree.add_collective(record)
    return tree


STEPS, LAYERS = 125, 200
RECORDS = STEPS * (1 + 4 * LAYERS)


@pytest.fixture(name="long_page", scope="module")
def _long_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100,000 records: steps of layers, each of a module, an operator, a move, a collective."""
    tree = CallTree()
    for step in range(STEPS):
        layers = [
            (module(f"layers.{layer}.up"),
             (linear(), (RedistributeCall((Shard(0),), (Replicate(),), (step, layer)),
                         collective(wire_bytes=step + layer))))
            for layer in range(LAYERS)]
        add(tree, module("(root)"), *layers)
    file = tmp_path_factory.mktemp("long") / "page.html"
    CommTrace(tree, 0, 2, 3).generate_html(file)
    return file


class TestLong:
    """A long trace. The bounds are generous: they tell a stall from none."""

    @staticmethod
    def seconds(page: Page, script: str) -> float:
        """From a script's start to the frame that shows what it did."""
        return page.run(
            "const start = performance.now();" + script + ";"
            "return new Promise((done) => requestAnimationFrame(() => setTimeout("
            "() => done(performance.now() - start))))") / 1000

    def test_no_stall(self, long_page: Path, show):
        page = show(long_page)
        assert page.text("#total-records") == f"{RECORDS:,}"
        load = page.run("const [entry] = performance.getEntriesByType('navigation');"
                        "return entry.domComplete") / 1000
        click = "document.getElementById('{}').click()"
        times = {
            "unfold": self.seconds(page, click.format("unfold-all")),
            "scroll": self.seconds(page, "document.getElementById('tree').scrollTop = 1e6"),
            "fold one": self.seconds(
                page, "document.querySelector('#tree .row.module .fold').click()"),
            "fold": self.seconds(page, click.format("fold-all")),
            "filter": self.seconds(page, "document.querySelector('.chip').click()"),
            "search": self.seconds(
                page, "const box = document.getElementById('search'); box.value = 'layers.17';"
                "box.dispatchEvent(new Event('input'))"),
            "zoom": self.seconds(page, click.format("zoom-in")),
        }
        assert load < 15 and max(times.values()) < 3, (load, times)
        assert page.text("#matches").endswith(f" of {RECORDS:,} records")
        assert page.run("return document.querySelectorAll('*').length") < 5000

    def test_the_last_row_is_reached(self, long_page: Path, show):
        page = show(long_page)
        page.find("#unfold-all").click()
        page.find("#tree").click()
        page.press("END")
        assert page.text("#details-title") == "all_reduce"
        assert page.texts("#details dd")[-3:][0] != "" and "layers.199.up" in page.text("#details")
