"""Command lines that each recipe refuses before anything is read, by the names of their flags. (Numbers that have no
meaning: tests/house/test_command_line.py, for every flag of every recipe; what random flags of face do together:
tests/recipes/face/test_combinations.py.)"""

import shlex

import pytest

from partial_fc.errors import UsageError
from recipes.face import main as face
from recipes.imagenet import main as imagenet
from recipes.kinetics import main as kinetics
from recipes.mnist import main as mnist
from recipes.mxnet import kvstore_job as mnist_kvstore

R50 = "slowfast_4x16_resnet50_kinetics400"
# What is right by itself -> what is added to it, and what the refusal names.
FACE = """
    --hard-negatives 2 | --hard-negatives without sampling
    --centre-state-dtype bf16 --head-optimizer adagrad | with --head-optimizer adagrad
    --centre-dtype fp16 --head-optimizer adamw | AdamW with its state in fp16
    --centre-state-dtype fp16 --optimizer adamw | AdamW with its state in fp16
    --head-optimizer nesterov --momentum 0 | nesterov with momentum 0
    --head-lr 0.1 --lr 0 | --head-lr 0.1 with --lr 0
    --precision fp64 --centre-dtype bf16 | centre-dtype
    --precision fp64 --head-impl cpu | fp64 goes with plain
    --loss cosfac | FILE.py:CLASS; did you mean cosface
    --accumulate 2 --loss adaface | averages over whole batches
    --accumulate 2 --loss curricularface | averages over whole batches
    --labels 3 --loss curricularface | told by one target
    --labels 3 --rule mlcd --loss curricularface | told by one target
    --head-impl triton --device cpu | --head-impl triton with --device cpu
    --head-impl cpu --device cuda | --head-impl cpu with --device cuda
    --start-centres a --resume b | --start-centres with --resume b
    --head-centres a --resume b | --head-centres with --resume b
    --loss arcface-straight-through --margins 1 0.3 0.1 | expected 1 m2 0
    --loss arcface --margins 1 0.3 0 | go with --loss combined
    --labels-drawn 2 | --labels-drawn 2 with --labels 1
    --labels 2 --labels-drawn 3 | --labels-drawn 3 with --labels 2
    --labels 2 --balance sqrt | --balance sqrt with --labels 2
    --rule own-out | --rule own-out with one label
    --labels 4 --labels-drawn 1 --rule mlc | --rule mlc with one label
    --pretrained-partial | --pretrained-partial
    --nodes 2 | --nodes 2 needs --master-addr
    --nodes 2 --nr 2 --master-addr a | --nr is 2, of --nodes 2
    --gpus 2 --master-port 65536 | --master-port is 65536
    --teacher-weight 2 | --teacher-weight requires --teacher
    --teacher x --teacher-weight 0 | --teacher-weight is 0
    --trust-code | --trust-code requires --teacher
    --rec x.npz | --rec x.npz has vectors: add --network none
    --network none | --network none takes vectors
"""
VECTORS = """
    --rec images | --network linear takes vectors
    --network none --no-mirror | --no-mirror with --network none
    --augment face | --augment with --network linear
    --network mlp:0 | --network is mlp:0
    --network none --ema 0.9 | --ema with --network none
    --compile | --compile with --network linear
"""
MNIST = """
    --gradient-compression powersgd | none, fp16, bf16
    --load-amp a.pt --resume b | --load-amp a.pt and --resume b
    --save-amp a.pt --precision fp64 | Apex's files hold fp32
"""
KVSTORE = """
    --kv-store dits_sync | dist_sync
    --gpus "0;2" | --gpus '0;2'
    --gpus 0,0 | --gpus 0,0
    --gpus 0,2 --cpus 2 | both name devices
    --cpus 2 --work-load-list 3,1,1 | --work-load-list 3,1,1 for 2 device(s)
    --cpus 2 --work-load-list 3,0 | --work-load-list 3,0
    --cpus 3 --batch-size 2 | --batch-size 2 for 3 devices
    --kv-store horovod | makes it a store of one process
    --kv-store nccl | --kv-store nccl
    --kv-store local --gc-type 2bit | --kv-store local has no compression
    --gc-threshold 0.1 | --gc-threshold 0.1 goes with --gc-type 2bit
    --lr-step-epochs 20,10 | --lr-step-epochs 20,10
    --lr-step-epochs soon | --lr-step-epochs 'soon'
    --top-k 10 | --top-k 10 of 10
    --loss mse | expected ce
    --load-epoch 3 | --load-epoch 3 needs --model-prefix
    --model-prefix m --load-epoch 20 | --load-epoch 20 of --num-epochs 20
"""
IMAGENET = """
    --resize 200 | --resize 200 is smaller than the crop, --image_size 227
    --num_channels 1 | --num_channels is 1; expected one of 3
    --batch_size 1 | --sync-bn
    --num_gpus 3 --batch_size 64 | 63 or 66
    --num_gpus 3 --batch_size 2 | try 3
    --num_gpus 0 | --num_gpus is 0
    --gpus 0,a | --gpus is '0,a'
    --dtype double | --dtype is double; expected float or float16
    --model shufflenet | --model shufflenet
    --pretrained a --load_model_path b | exclude each other
    --num_shards 2 --shard_id 2 | shards are numbered from 0 to 1
    --redis_port 65536 | is 65536
    --run_id "" | --run_id ''
    --num_layers 20 | resnet20; expected one of resnet18
    --scale 30 --sample-rate 0.5 | --scale, --sample-rate without --head partial-fc
    --db_type minidb | convert_db makes an LMDB
    --db_type hdf5 | expected one of lmdb, leveldb
"""
KINETICS = """
    --kvstore dist_async_device | Take --kvstore dist_sync_device
    --use-tsn | --use-tsn
    --use-pretrained | --resume-params
    --new-step 2 | --new-step is 2
    --slow-temporal-stride 8 | takes 32 and 4: --new-length 64
    --num-segments 10 | --eval
    --logging-file a/b.log | --save-dir
    --lr-decay-epoch x | 40,60
    --resume-states f.states | leave it out
    --resume-epoch 3 | --resume-epoch 3 of --num-epochs 3
    --model slowfast_4x16_resnet50_sthsthv2 | slowfast_4x16_resnet50_custom
"""
RECIPES = {
    "face": (face.parse, "--dataset synthetic --num-classes 50", FACE),
    "face on vectors": (face.parse, "--rec x.npz --network linear", VECTORS),
    "mnist": (mnist.parse, "", MNIST),
    "mnist on mxnet": (mnist_kvstore.parse, "", KVSTORE),
    "imagenet": (imagenet.parse, "--train_data db", IMAGENET),
    "kinetics": (kinetics.parse, f"--model {R50} --train-list t.txt --val-list v.txt", KINETICS),
    "kinetics, no test": (kinetics.parse, f"--model {R50} --train-list t.txt", "| --val-list is missing"),
    "kinetics, no data": (kinetics.parse, f"--model {R50} --val-list v.txt", "| --train-list is missing"),
}
CASES = [(recipe, line) for recipe, (_, _, lines) in RECIPES.items() for line in lines.strip().splitlines()]


@pytest.mark.parametrize(("recipe", "line"), CASES)
def test_flags_that_make_no_sense(recipe, line):
    parse, right, _ = RECIPES[recipe]
    flags, _, named = line.partition("|")
    with pytest.raises(UsageError) as refused:
        parse(shlex.split(f"{right} {flags}"))
    assert named.strip() in str(refused.value)
