"""What mkdocs is told of the site's pages: they are those of ``docs/``, and what these link to in the repository.

A page keeps its path in the repository, so links between pages lead on as they do there. Files that are not pages are
shown as text.
"""

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<=\]\()([^)\s:#]+)(#[^)\s]*)?(?=\))")
_ROLE = re.compile(r":\w+:<code>(?:([\w.]+) &lt;)?(~?)([\w.]+)(?:&gt;)?</code>")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Put the repository's paths in place of those within ``docs/``, and add what is linked to."""
    own = [file for file in files if file.src_dir == config.docs_dir and not file.is_css()]
    for file in own:
        files.remove(file)
    texts: dict[str, str] = {}
    images: set[str] = set()
    waiting = ["README.md", *(f"docs/{file.src_uri}" for file in own if file.is_documentation_page())]
    while waiting:
        path = waiting.pop()
        texts[path] = _text(path)
        for link, _ in _LINK.findall(texts[path]):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
            if target.endswith(".png"):
                images.add(target)
            elif target not in texts and (ROOT / target).exists():
                waiting.append(target)
    for path, text in texts.items():
        files.append(File.generated(config, _page(path), content=_LINK.sub(_leading_on(path), text)))
    for path in images:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links of the roles that docstrings have."""
    if page.file.src_uri != "docs/api.md":
        return html
    return _ROLE.sub(_reference, html).replace("Example::", "Example:")


def _reference(role: "re.Match[str]") -> str:
    name = role[1] or (role[3].rpartition(".")[2] if role[2] else role[3])
    return f'<autoref identifier="{role[3]}" optional><code>{name}</code></autoref>'


def _text(path: str) -> str:
    """Return what a page shows: its own text, or files."""
    return (ROOT / path).read_text() if path.endswith(".md") else _shown(path)


def _shown(path: str) -> str:
    """Return the text of a page that shows a file, or all yaml files of a folder."""
    if (ROOT / path).is_file():
        return f"# {Path(path).name}\n\n{_fenced(ROOT / path)}"
    parts = [f"## {file.relative_to(ROOT)}\n\n{_fenced(file)}" for file in sorted((ROOT / path).rglob("*.yaml"))]
    return "\n\n".join([f"# {path}", *parts])


def _fenced(file: Path) -> str:
    language = {".py": "python", ".sbatch": "bash"}.get(file.suffix, file.suffix[1:])
    return f"````{language}\n{file.read_text()}````\n"


def _page(path: str) -> str:
    """Return the page that shows a path of the repository."""
    if path.endswith(".md"):
        return path
    return f"{path}.md" if "." in posixpath.basename(path) else f"{path}/index.md"


def _leading_on(path: str) -> "Callable[[re.Match[str]], str]":
    """Return what puts the page in place of each link of a text."""
    folder = posixpath.dirname(path)

    def instead(link: "re.Match[str]") -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        if target.endswith(".png") or not (ROOT / target).exists():
            return link[0]
        return posixpath.relpath(_page(target), folder or ".") + (link[2] or "")

    return instead
