"""What the pretended device must do, checked in a process that has two of them."""

import os

import pretended_cuda
import torch

ones = torch.ones(2, 3, device="cuda:0")
assert str((ones * 2 + 1).device) == "cuda:0"

weight = torch.nn.Parameter(torch.ones(4, 3, device="cuda:1"))
try:
    torch.nn.functional.linear(ones, weight)
except RuntimeError as error:
    assert "at least two devices" in str(error)
else:
    raise AssertionError("tensors of two devices were computed together")

with torch.autocast("cuda", dtype=torch.bfloat16):
    product = torch.nn.functional.linear(ones.to("cuda:1"), weight)
assert product.dtype == torch.bfloat16
product.float().sum().backward()
assert weight.grad is not None and weight.grad.tolist() == [[2.0] * 3] * 4

halves = torch.full((2, 3), 1 / 3, device="cuda:0", dtype=torch.bfloat16)  # a GPU alone multiplies them into fp32
exact = halves.double() @ halves.double().t()
for product in (
    torch.mm(halves, halves.t(), out_dtype=torch.float32),
    torch.addmm(torch.zeros(2, 2, device="cuda:0"), halves, halves.t(), out_dtype=torch.float32),
    torch.bmm(halves[None], halves.t()[None], out_dtype=torch.float32)[0],
):
    assert product.dtype == torch.float32 and (product - exact).abs().max() < 1e-6

before = torch.cuda.memory_allocated(0)
block = torch.empty(1000, dtype=torch.uint8, device="cuda:0")
assert torch.cuda.memory_allocated(0) - before == 1024  # blocks of 512 bytes
del block
assert torch.cuda.memory_allocated(0) == before
try:
    torch.empty(81 * 2**30, dtype=torch.uint8, device="cuda:0")
except torch.OutOfMemoryError as error:
    assert "CUDA out of memory" in str(error)
else:
    raise AssertionError("more than the device has was allocated")

graph = torch.cuda.CUDAGraph()
static = torch.zeros(3, device="cuda:0")
with torch.no_grad(), torch.cuda.graph(graph):
    column = (static * 2 + 1).view(3, 1)
    total = column.sum()
static.fill_(5.0)
assert total.item() == 3.0
graph.replay()
assert column.flatten().tolist() == [11.0] * 3 and total.item() == 33.0

halves = torch.full((4,), 0.5, device="cuda:0")
for target in (torch.empty(4, pin_memory=True), torch.empty(4).pin_memory()):
    assert target.is_pinned() and not torch.empty(4).is_pinned()
    event = torch.cuda.Event()
    event.record()
    target.copy_(halves, non_blocking=True)
    event.synchronize()  # it was recorded before the copy
    assert target.isnan().all(), "a copy was there before the host waited for it"
    torch.cuda.synchronize()
    assert target.tolist() == [0.5] * 4
on_host = halves.to("cpu", non_blocking=True)
assert on_host.isnan().all()
assert halves.sum().item() == 2.0 and on_host.tolist() == [0.5] * 4  # item() waits for the stream
pageable = torch.empty(4)
pageable.copy_(halves, non_blocking=True)
assert pageable.tolist() == [0.5] * 4
large = torch.empty(5000, dtype=torch.uint8, pin_memory=True)
assert pretended_cuda.pinned_bytes_and_peak()[0] >= 8192  # powers of two

child = os.fork()
if child == 0:
    try:
        torch.ones(1, device="cuda:0")
        torch.cuda.synchronize()
    except RuntimeError as error:
        os._exit(0 if "forked subprocess" in str(error) else 2)
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "a fork used the device"
print("as a GPU does")
