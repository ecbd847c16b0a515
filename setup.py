"""The README as a package index shows it; all else of the package is told by setup.cfg.

Links and pictures are relative in the repository, and an index knows no repository. ``PROJECT_URL``, in the environment
of the build, is where the repository can be seen (``PROJECT_URL=https://host/owner/name``, of GitHub or one like it):
with it they are absolute, and the index names it. Without it links are their text, and pictures what stands for them.
"""

import os
import re
from pathlib import Path

from setuptools import setup

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|#)([^)]+)\)")


def on_an_index(text: str, url: str) -> str:
    """Return a text whose links do not depend on where it stands."""
    if not url:
        return _LINK.sub(r"\2", text)
    return _LINK.sub(lambda link: f"{link[1]}[{link[2]}]({url}/{'raw' if link[1] else 'blob'}/HEAD/{link[3]})", text)


if __name__ == "__main__":
    url = os.environ.get("PROJECT_URL", "").rstrip("/")
    setup(
        long_description=on_an_index((Path(__file__).parent / "README.md").read_text(), url),
        long_description_content_type="text/markdown",
        project_urls={"Source": url, "Changelog": f"{url}/blob/HEAD/CHANGELOG.md"} if url else {},
    )
