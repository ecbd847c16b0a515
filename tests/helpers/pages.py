import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/benchmarks/README.md")] + sorted(
    DOCS.rglob("*.md")
)


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def prose(page):
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def spans(page):
    return [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", prose(page))]


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section(page, heading):
    _, _, after = page.read_text().partition(f"\n{heading}\n")
    return after.partition("\n## ")[0]


def rows(page, heading):
    table = re.search(r"(?:^\|.*\n)+", section(page, heading), re.MULTILINE)
    assert table is not None, f"{page} has no table after {heading!r}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def shown_commands(command):
    text = "".join(page.read_text() for page in PAGES)
    return sorted(set(re.findall(rf"^lightning-sparse {command} (.*)$", text, re.MULTILINE)))
