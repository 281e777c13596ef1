"""A worker of a KVStore job, in ten lines: pushes ones times its number + 1, and pulls the sum.

kv_job.py [raise|wait] [FILE]        wait: pushes and pulls for ever, once FILE has its and the other's line
"""

import os
import sys

from recipes.mxnet.library import mx  # servers and the scheduler stay in here

what, file = (*sys.argv[1:], "", "")[:2]
store = mx.kvstore.create("dist_sync")
number = int(os.environ["DMLC_TASK_ID"])
store.init("w", mx.nd.zeros(3))
pulled = mx.nd.zeros(3)
while True:
    store.push("w", mx.nd.ones(3) * (number + 1))
    store.pull("w", pulled)
    if what != "wait":
        break
    pulled.wait_to_read()
    if file:
        with open(file, "a") as lines:
            lines.write(f"{os.getpid()}\n")
        file = ""
print(pulled.asnumpy().tolist(), flush=True)
if what == "raise" and number == 1:
    # An exception's own way out leads through MXNet's end, where it would wait for the others for ever.
    print("cannot go on", file=sys.stderr, flush=True)
    os._exit(4)
mx.nd.waitall()
