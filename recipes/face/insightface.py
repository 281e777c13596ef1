"""Other names of flags, settings and networks in InsightFace's and most other trainers."""

# Theirs, with - for _ (or "flag value") -> ours, for the error message. docs/coming-from-insightface.md has all.
ELSEWHERE = {
    # arcface_torch: keys of its configuration files, which users also try as flags.
    "num-image": "it is --num-images",
    "num-epoch": "it is --epochs",
    "warmup-epoch": "it is --warmup-epochs",
    "gradient-acc": "it is --accumulate",
    "margin-list": "it is --loss combined --margins m1 m2 m3 (or --loss arcface, cosface)",
    "fp16": "it is --precision fp16 (or bf16, which needs no loss scale)",
    "output": "it is --models-root",
    "save-all-states": "checkpoints always hold all states",
    "dali": "the loader's own threads decode: --num-workers",
    "using-wandb": "it is --wandb PROJECT (TensorBoard gets the curves in any case)",
    # Partial FC on MXNet: settings of its default.py. (Its four flags have the same names here.)
    "debug": "made-up data is --dataset 100w (1000w, ... 10000w), or --dataset synthetic --num-classes N",
    "sample-ratio": "it is --sample-rate",
    "memory-bank-lr": "it is --head-lr",
    "max-update": "it is --max-steps",
    "loss-s": "it is --scale",
    "loss-m1": "it is the first of --margins, with --loss combined",
    "loss-m2": "it is the second of --margins, with --loss combined",
    "loss-m3": "it is the third of --margins, with --loss combined",
    # Network names in default.py.
    **dict.fromkeys(
        ("network r122", "network rx50", "network rx101"),
        "InsightFace lists it, too, and has no code for it: it raises there",
    ),
    # timm, torchvision, ultralytics and others.
    **dict.fromkeys(("data", "data-dir", "data-path", "train-dir", "train-data", "root"), "it is --rec"),
    **dict.fromkeys(("arch", "model"), "it is --network"),
    **dict.fromkeys(("img-size", "imgsz", "input-size", "resolution"), "it is --image-size"),
    **dict.fromkeys(("output-dir", "out-dir", "save-dir", "out", "log-dir"), "it is --models-root"),
    **dict.fromkeys(("weights", "checkpoint", "ckpt", "init"), "--pretrained takes a backbone, --resume a checkpoint"),
    **dict.fromkeys(("num-epochs", "max-epochs"), "it is --epochs"),
    **dict.fromkeys(("num-threads", "num-thread"), "it is --num-workers"),
    **dict.fromkeys(("gradient-accumulation-steps", "grad-accum", "iter-size"), "it is --accumulate"),
    **dict.fromkeys(("nproc", "nproc-per-node", "num-gpus", "world-size"), "it is --gpus, processes on this host"),
    **dict.fromkeys(("clip-grad", "max-norm"), "it is --clip"),
    "amp": "it is --precision bf16 or fp16; auto takes bf16 where the hardware has it",
    "opt": "it is --optimizer",
    "scheduler": "it is --lr-scheduler",
    # Networks, as "flag value".
    **{
        f"network {family}{depth}": f"it is r{depth} here"
        for family in ("resnet", "resnet-", "iresnet", "ir", "ir_", "ir-", "irse", "r_")
        for depth in (18, 34, 50, 100, 200)
    },
    "network resnet101": "the nearest here is r100",
    **dict.fromkeys(("network mobilefacenet", "network mobilenet"), "mbf is MobileFaceNet"),
    **{f"network vit-{size}": f"it is vit_{size}" for size in "tslbh"},
    "network vit": "they are vit_t, vit_s, vit_b, vit_l and vit_h",
    **dict.fromkeys(("network vit_t_dp005_mask_0", "network vit_t_dp005"), "arcface_torch spells it vit_t_dp005_mask0"),
}
