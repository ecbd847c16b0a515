import re

from tests.helpers.commands import COMMAND, MODEL, begin

CONFIG = """
trainer:
  strategy: sparse_lags
  accelerator: cpu
  devices: 2
  max_epochs: 1
  limit_train_batches: 4
  limit_val_batches: 0
  enable_checkpointing: false
  enable_progress_bar: false
  logger: false
  default_root_dir: {root}
  callbacks:
    - class_path: lightning_sparse.callbacks.MomentumCorrection
      init_args: {{momentum: optimizer, clip_norm: 1.0}}
    - class_path: lightning_sparse.callbacks.AdaptiveDensity
      init_args:
        max_density: 0.2
        every_n_steps: 1
        rules:
          - class_path: lightning_sparse.callbacks.ErrorBudget
            init_args: {{budget: 0.001}}
"""


def test_rules_are_built_from_yaml(pair, tmp_path):
    config = tmp_path / "fit.yaml"
    config.write_text(CONFIG.format(root=tmp_path))
    said, _ = pair.run(begin, COMMAND, ("fit", MODEL, f"--config={config}"), str(tmp_path))
    assert "momentum before selection: optimizer" in said
    # Without the rule, the ratio is larger, because the rule doubles the density after each step.
    assert float(re.search(r"compression ratio ([\d.]+)", said)[1]) < 40
