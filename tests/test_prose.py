"""Limits for words and forms that make docstrings, comments, messages and pages hard to read. Limits only go down."""

import ast
import re
import tokenize
from collections import Counter

import pytest

from tests.helpers.pages import ROOT

WORDS = {  # occurrences per 1000 words
    "what": r"what(?:ever)?",
    "pronouns": r"it|they|them|those|these|ones?|others?|theirs|its|their|itself|such",
    "whose": r"whose|(?:of|in|with|by|from|to|under|on|after|through) (?:which|whom)",
    "nobody": r"nobody|somebody|someone|whoever|everybody|anybody",
    "tell": r"tells?|told|telling|hears?|heard",
    "know": r"knows?|knew|known",
    "keep": r"keeps?|kept|leaves?|left",
}
FORMS = {  # percent: comments that start without a noun, first lines of docstrings with two sentences in one
    "fragments": ("comment", re.compile(r"(?:of|by|in|on|at|to|with|from|which|who|whose|that|those|these|it|they|else"
                                        r"|also|as|where|what|or|and|but|than|until|for|so)\b")),
    "semicolons": ("docstring", re.compile(r".*;")),
}  # fmt: skip
PAGES = dict(zip([*WORDS, *FORMS], (2, 28, 1.5, 0.1, 0.4, 0.8, 2.5, 10, 3)))
LIMITS = {
    "lightning_sparse": dict(zip(PAGES, (1, 20, 1, 0.1, 0.2, 0.5, 2, 8, 2))),
    "tests": PAGES,
    "README.md": PAGES,
    "CONTRIBUTING.md": PAGES,
    "docs": PAGES,
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def strings(node):
    return " ".join(each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and type(each.value) is str)


def texts(path):
    """Yield the kind and the text of every docstring, comment and message of a module, or the text of a page."""
    if path.suffix == ".md":
        yield "page", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        return
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            words = token.string.split() if token.type == tokenize.COMMENT else []
            if len(words) > 3 and not re.match(r"type:|noqa|ruff|fmt", words[1]):
                yield "comment", " ".join(words[1:])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, DOCUMENTED):
            yield "docstring", re.sub(r"^ *(>>>|\.\.\.).*$", "", ast.get_docstring(node) or "", flags=re.MULTILINE)
        elif isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name.endswith(("Error", "Exception")) or "warn" in name or "log" in name:
                yield "message", strings(node.args[0])
        elif isinstance(node, ast.Assign) and isinstance(node.value, (ast.Constant, ast.JoinedStr)):
            yield "message", text if len((text := strings(node.value)).split()) > 5 else ""


def rates(root):
    """Return the rate of each of the words and forms, over all files of a folder."""
    found, total = Counter(), Counter()
    for path in [root] if root.is_file() else [*root.rglob("*.py"), *root.rglob("*.md")]:
        for kind, text in texts(path):
            plain = re.sub(r"``[^`]*``|`[^`]*`|\]\([^)]*\)", " ", text)
            total["words"] += len(re.findall(r"[A-Za-z']+", plain))
            total[kind] += bool(text)
            found.update({name: len(re.findall(rf"\b(?:{word})\b", plain, re.I)) for name, word in WORDS.items()})
            found.update({name: kind == of and bool(form.match(text)) for name, (of, form) in FORMS.items()})
    counted = {name: 1000 * found[name] / max(1, total["words"]) for name in WORDS}
    return counted | {name: 100 * found[name] / max(1, total[kind]) for name, (kind, _) in FORMS.items()}


@pytest.mark.parametrize("path", LIMITS)
def test_words_that_hide_the_noun_are_rare(path):
    above = {name: rate for name, rate in rates(ROOT / path).items() if rate > LIMITS[path][name]}
    assert not above, f"{path} is above its limits {LIMITS[path]}. Name the noun, as CONTRIBUTING.md says."
