"""A worker of a job that test_mnist_kvstore.py starts: several checks of one store in one launch."""

import os
import sys

import numpy as np

# The test vector: a gradient, and twice as much of it from a second worker.
GRADIENT = np.array([0.2, 0.6, -0.5, 1.7, 0.49, -3.0, 1e-3, 0.5, -0.26], np.float32)
NUM_PUSHES, THRESHOLD = 4, 0.5


def main(pulls: str, *flags: str) -> None:
    """What the test vector is pulled as goes to PULLS-RANK.npy; then the recipe trains, over the same store."""
    from recipes.mxnet import kvstore
    from recipes.mxnet import kvstore_job as mnist_kvstore
    from recipes.mxnet.library import mx

    with kvstore.joined("dist_sync", 30) as job:
        store = job.store
        assert store is not None
        store.set_gradient_compression({"type": "2bit", "threshold": THRESHOLD})
        store.init("vector", mx.nd.zeros(len(GRADIENT)))
        pulled = []
        for _ in range(NUM_PUSHES):
            pull = mx.nd.zeros(len(GRADIENT))
            store.pushpull("vector", mx.nd.array(GRADIENT * (1 + job.rank)), out=pull)
            pulled.append(pull.asnumpy())
        np.save(f"{pulls}-{job.rank}.npy", np.stack(pulled))
        mnist_kvstore.train(mnist_kvstore.parse(list(flags)), job)


if __name__ == "__main__":
    if os.environ["DMLC_ROLE"] == "worker":
        main(*sys.argv[1:])
    else:
        import recipes.mxnet.library  # noqa: F401
