"""The page about the table; ``python -m tests.compatibility.page > docs/compatibility.md`` writes it."""

from collections.abc import Sequence

from tests.compatibility.rows import ROWS
from tests.compatibility.running import IN_EVERY_ROW, Feature

_TEXT = """# Feature compatibility

Each cell is a test in two processes (`tests/test_compatibility.py`, from whose rows this page is generated): ranks end
with the same parameters to the bit, the parameters have moved, and the bytes fell as much as they should. The last
column says what else is tested. Strategies that exchange in every step share a column: `sparse_topk` is tested with
every row, and plain `ddp`, `sparse_lags`, `sparse_exdyna`, `sparse_sdagc` and `sparse_omgs` with every fifth.
`sparse_auto` changes to plain DDP and back on the way, wherever four steps give it the time.

- **yes**: works, and does what the last column says.
- **no**: refused, with an error that names the cure; see below.
- **GPU**: Lightning's `ddp` needs a GPU for it, and so do these strategies; the test on CPU expects torch's error.

{table}

{refusals}- Gradient clipping acts after the exchange. With Adam and AdamW it acts on each rank's gradient before
  selection; with `sparse_a2sgd` and local steps on each rank's own.
- A layer that no rank ever uses is sent whole with Adam and AdamW, as with `ddp`: its second moment stays unknown.
- Replicas of `sparse_a2sgd` diverge and are averaged every 50 steps, before validation, before a checkpoint and at the
  end: there they are compared, with the other strategies after every step. Ranks of `sparse_loco`, here in rounds of
  two local steps, are one model at validation, in a checkpoint and at the end.
- A LightningModule that is compiled as a whole cannot call `self.log` in a step, with `ddp` either (torch 2.13).
"""


def cell(feature: Feature, strategy: str) -> str:
    """Return the word in a cell."""
    if strategy in feature.refusals:
        return "no"
    return "GPU" if feature.needs_gpu else "yes"


def page(rows: Sequence[Feature]) -> str:
    """Return the whole page."""
    names = ["every step", *[f"`{name}`" for name in IN_EVERY_ROW[1:]]]
    table = [["what you do", *names, "what its tests show"], ["---", *[":-:" for _ in names], "---"]]
    table += [[row.name, *[cell(row, strategy) for strategy in IN_EVERY_ROW], row.effect] for row in rows]
    refusals = [
        f"- {row.name} with `{strategy}` is refused: *... {message} ...*\n"
        for row in rows
        for strategy, message in row.refusals.items()
    ]
    lines = ["| " + " | ".join(line) + " |" for line in table]
    return _TEXT.format(table="\n".join(lines), refusals="".join(refusals))


if __name__ == "__main__":
    print(page(ROWS), end="")
