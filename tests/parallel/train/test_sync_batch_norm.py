import torch

from partial_fc.models import build
from partial_fc.train.batch_norm import convert


def test_ranks_together_equal_one_process_with_the_whole_batch(world):
    """Features, running statistics and summed gradients of a whole backbone, in double precision."""
    rows = [3 + rank for rank in range(world.size)]
    mine = slice(sum(rows[: world.rank]), sum(rows[: world.rank + 1]))
    torch.manual_seed(0)  # the same weights and batch on every rank
    shared, dense = build("tiny", 16, image_size=24).double(), build("tiny", 16, image_size=24).double()
    dense.load_state_dict(shared.state_dict())
    image, weight = torch.randn(sum(rows), 3, 24, 24).double(), torch.randn(sum(rows), 16).double()
    shared = convert(shared, world)

    feat = shared(image[mine])
    (feat * weight[mine]).sum().backward()
    feat_dense = dense(image)
    (feat_dense * weight).sum().backward()

    torch.testing.assert_close(feat, feat_dense[mine])
    for name, parameter in dense.named_parameters():
        grad = shared.get_parameter(name).grad
        if grad is not None:
            total = world.all_reduce(grad, name=f"test/{name}")
            torch.testing.assert_close(total, parameter.grad, msg=lambda text, name=name: f"{name}: {text}")
    for name, buffer in dense.named_buffers():
        torch.testing.assert_close(shared.get_buffer(name), buffer)
        values = world.all_gather(shared.get_buffer(name).reshape(1, -1).double(), name=f"test/{name}")
        assert torch.equal(values, values[:1].expand_as(values))  # to the bit
