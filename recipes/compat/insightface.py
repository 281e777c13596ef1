"""Flags and settings of InsightFace's trainers, arcface_torch and Partial FC on MXNet, that have another name here."""

# Theirs, with - for _ (or a flag and its value) -> ours, as the message of a wrong one says it.
# docs/coming-from-insightface.md has all of them.
ELSEWHERE = {
    # arcface_torch: keys of its configuration files, which people also try as flags.
    "num-image": "it is --num-images",
    "num-epoch": "it is --epochs",
    "warmup-epoch": "it is --warmup-epochs",
    "gradient-acc": "it is --accumulate",
    "margin-list": "it is --loss combined --margins m1 m2 m3 (or --loss arcface, cosface)",
    "fp16": "it is --precision fp16 (or bf16, which needs no loss scale)",
    "output": "it is --models-root",
    "save-all-states": "checkpoints always hold all states",
    "dali": "the loader's own threads decode: --num-workers",
    "using-wandb": "curves go to TensorBoard, below --models-root",
    "local-rank": "torchrun, horovodrun and srun say it through the environment; leave it out",
    # Partial FC on MXNet: settings of its default.py. (Its four flags have the same names here.)
    "debug": "made-up data is --dataset 100w (1000w, ... 10000w), or --dataset synthetic --num-classes N",
    "sample-ratio": "it is --sample-rate",
    "backbone-lr": "it is --lr",
    "memory-bank-lr": "it is --head-lr",
    "max-update": "it is --max-steps",
    "loss-s": "it is --scale",
    "loss-m1": "it is the first of --margins, with --loss combined",
    "loss-m2": "it is the second of --margins, with --loss combined",
    "loss-m3": "it is the third of --margins, with --loss combined",
    # Names of its --network in default.py.
    **dict.fromkeys(
        ("network r122", "network rx50", "network rx101"),
        "InsightFace lists it, too, and has no code for it: it raises there",
    ),
}
