"""Packages that other people might install."""

from pathlib import Path

GROUP = "lightning_sparse.compressors"


def install(folder: Path, package: str, entries: dict[str, str], code: str = "", group: str = GROUP) -> None:
    """Write a package with its metadata, as pip would install it, which names classes in a group of entry points."""
    (folder / f"{package}.py").write_text(code)
    metadata = folder / f"{package}-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    rows = "".join(f"{name} = {value}\n" for name, value in entries.items())
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{rows}")
