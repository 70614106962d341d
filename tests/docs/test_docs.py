"""The README and every page of docs/ show code that runs and output that it prints."""

import re
from pathlib import Path

import pytest

from tests.docs.runner import examples_of, ranks_of
from tests.torch.launcher import ROOT, Case, Report, run_case, run_ranks

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def case_for(document: Path, folder: Path) -> Case:
    """A worker file that runs a document's examples on its number of ranks."""
    nproc = ranks_of(document.read_text(encoding="utf-8"))
    file = folder / "_test_document.py"
    file.write_text("from tests.docs.runner import run_document\n\n\n"
                    f"def test_document() -> None:\n    run_document({str(document)!r})\n")
    return Case(file, "test_document", nproc, timeout=120)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document(document: Path, tmp_path: Path) -> None:
    assert examples_of(document.read_text(encoding="utf-8")), "a page without a single example"
    run_case(case_for(document, tmp_path))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_targets_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert [link for link in links if not (document.parent / link).exists()] == []
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    named = re.findall(r"^make (\w+)|`make (\w+)`", text, re.M)
    assert {first or second for first, second in named} <= set(targets)


def reports_on(text: str, folder: Path) -> list[Report]:
    """Runs a document that consists of ``text``."""
    document = folder / "page.md"
    document.write_text(text)
    return run_ranks(case_for(document, folder))


def test_blocks_are_one_program(tmp_path: Path) -> None:
    text = "```python\nx = 3\n```\nprose\n```python\nprint(x)\n```\nprints\n```text\n3\n```\n"
    assert [report.outcome for report in reports_on(text, tmp_path)] == ["passed"]


def test_a_wrong_output_is_found(tmp_path: Path) -> None:
    report, = reports_on("one\n\n```python\nprint(1)\n```\n\n```text\n2\n```\n", tmp_path)
    assert report.outcome == "failed" and "page.md:4 prints\n1" in report.text


def test_an_error_has_the_line_of_the_document(tmp_path: Path) -> None:
    report, = reports_on("one\n\n```python\nx = 1\nx / 0\n```\n", tmp_path)
    assert report.outcome == "failed" and 'page.md", line 5' in report.text


def test_only_rank_zero_prints(tmp_path: Path) -> None:
    text = "<!-- ranks: 2 -->\n```python\nimport os\nprint(os.environ['RANK'])\n```\n"
    reports = reports_on(text, tmp_path)
    assert [report.outcome for report in reports] == ["passed", "failed"]
    assert "rank 1 prints, too" in reports[1].text


def test_one_rank_is_plain_python(tmp_path: Path) -> None:
    text = ("```python\nimport os\nimport torch.distributed as dist\n"
            "print('RANK' in os.environ, dist.is_initialized())\n```\n```text\nFalse False\n```\n")
    assert [report.outcome for report in reports_on(text, tmp_path)] == ["passed"]
