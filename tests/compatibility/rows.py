from functools import partial

from lightning_sparse import AdamCorrection
from tests.compatibility import checks, modules
from tests.compatibility.running import Feature

# Of eight steps two are dense, the density decays in two, and four are sparse, including a mean gradient.
_SOON = {"optimizer_correction": AdamCorrection(warmup_steps=2, density_decay_steps=2, second_moment_interval=5)}

ROWS = (
    Feature(
        "`accumulate_grad_batches=4`, the last window short",
        checks.windows,
        lambda folder: {
            "accumulate_grad_batches": 4,
            "limit_train_batches": 6,
            "limit_val_batches": 0,
            "max_epochs": 2,
        },
    ),
    Feature("`gradient_clip_val`", checks.norms, lambda folder: {"gradient_clip_val": checks.CLIP}),
    Feature(
        '`precision="bf16-mixed"`',
        checks.types,
        lambda folder: {"precision": "bf16-mixed"},
        use=checks.fit_noting_types,
    ),
    Feature("manual optimization, two optimizers in turn", checks.one_step_a_batch, module=modules.ByHand),
    Feature(
        "manual optimization, two optimizers that toggle (GAN)", checks.two_steps_a_batch, module=modules.Adversaries
    ),
    Feature(
        "the same, batches accumulated by `toggle_model(sync_grad=...)`",
        checks.two_steps_in_two_batches,
        module=modules.PatientAdversaries,
    ),
    Feature(
        "parameters that some ranks do not use",
        checks.one_step_a_batch,
        module=modules.Unused,
        untrained=frozenset({"never.weight", "never.bias"}),
    ),
    Feature(
        "`find_unused_parameters=True`, `static_graph=True`",
        checks.one_step_a_batch,
        strategy={"find_unused_parameters": True, "static_graph": True},
    ),
    Feature(
        "`sync_batchnorm=True`",
        checks.normalized_together,
        lambda folder: {"sync_batchnorm": True},
        module=modules.Normalized,
        refusals={"sparse_loco": "exchanges nothing between rounds, but SyncBatchNorm communicates"},
        needs_gpu=True,
    ),
    Feature(
        "a `LayerSync` plugin whose layers communicate in forward and backward",
        checks.normalized_together,
        lambda folder: {"plugins": [modules.NormSync()]},
        module=modules.Normalized,
    ),
    Feature("`validate`, `test`, `predict` after `fit`", checks.evaluated, use=checks.fit_and_evaluate),
    Feature("two `fit`s of one Trainer", checks.continued, use=checks.fit_twice),
    Feature("Adam", checks.moments, module=partial(modules.Plain, modules.adam), strategy=_SOON),
    Feature(
        "AdamW, `gradient_clip_val`, `accumulate_grad_batches=2`",
        checks.moments_of_windows,
        lambda folder: {"gradient_clip_val": checks.CLIP, "accumulate_grad_batches": 2, "max_epochs": 2},
        module=partial(modules.Plain, modules.adamw),
        strategy=_SOON,
    ),
    Feature(
        "AdamW, two optimizers that toggle (GAN)",
        checks.two_steps_a_batch,
        module=partial(modules.Adversaries, modules.adamw),
        strategy=_SOON,
    ),
    Feature(
        "AdamW, parameters that some ranks do not use",
        checks.one_step_a_batch,
        module=partial(modules.Unused, modules.adamw),
        strategy=_SOON,
        untrained=frozenset({"never.weight", "never.bias"}),
        sent_whole=1056 / 6304,  # parameters without a second moment
    ),
    Feature(
        "`torch.compile` of the LightningModule, whose step does not log",
        checks.compiled,
        lambda folder: {"limit_val_batches": 0},
        module=modules.Silent,
        use=checks.fit_compiled,
    ),
    Feature(
        "`torch.compile` of a network inside",
        checks.compiled,
        module=modules.PartlyCompiled,
        use=checks.fit_counting_graphs,
    ),
    Feature(
        "`ModelCheckpoint`, `EarlyStopping`", checks.kept_and_stopped, checks.keepers, use=checks.fit_and_load_the_best
    ),
    Feature(
        "`StochasticWeightAveraging`",
        checks.averaged,
        checks.averaging,
        use=checks.fit_noting_starts,
        refusals=dict.fromkeys(("sparse_a2sgd", "sparse_loco"), "replicas drift apart between two averages"),
    ),
    Feature("`self.log(..., sync_dist=True)`", checks.means),
    Feature(
        "`Tuner.lr_find`",
        checks.found_rate,
        lambda folder: {"default_root_dir": folder, "enable_checkpointing": True, "max_epochs": 4},
        use=checks.find_a_rate,
    ),
)
