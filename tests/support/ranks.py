"""Two processes that train together over gloo, and what they are asked to do there."""

import multiprocessing
import os
import tempfile
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from prepare import checkpoint
from prepare.pipeline import Pipeline
from prepare.pipeline.distributed import same_on_all_ranks
from prepare.stages.tune import tune_model
from sample_nets import small

FLAT = Pipeline.from_config({"conv2d_memory_format": {}})
PATIENCE = timedelta(seconds=60)


class Ranks:
    """Starts the processes once; called with a function of this file, gives what each of them returned."""

    def __init__(self, folder):
        context = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")
        context.set_forkserver_preload(["torch", "prepare.pipeline"])
        self._inboxes = [context.Queue() for _ in range(2)]
        self._outbox = context.Queue()
        self._processes = [
            context.Process(target=_serve, args=(rank, f"{folder}/meeting", inbox, self._outbox), daemon=True)
            for rank, inbox in enumerate(self._inboxes)
        ]  # fmt: skip
        for process in self._processes:
            process.start()

    def __call__(self, job, *args):
        for inbox in self._inboxes:
            inbox.put((job, args))
        answers = dict(self._outbox.get(timeout=PATIENCE.seconds) for _ in self._inboxes)
        failed = [answer for answer in answers.values() if isinstance(answer, _Failure)]
        assert not failed, "\n".join(failure.trace for failure in failed)
        return [answers[rank] for rank in sorted(answers)]

    def stop(self):
        for inbox in self._inboxes:
            inbox.put(None)
        for process in self._processes:
            process.join(10)
            process.kill()


class _Failure:
    def __init__(self):
        self.trace = traceback.format_exc()


def _serve(rank, meeting, inbox, outbox):
    torch.set_num_threads(1)
    torch.set_warn_always(True)  # else torch warns once in a process, and later tests see silence
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=PATIENCE
    )
    while (asked := inbox.get()) is not None:
        job, args = asked
        try:
            answer = job(*args)
        except BaseException:
            answer = _Failure()
        outbox.put((rank, answer))
    distributed.destroy_process_group()


# ------------------------------------------------------------------------------- what they share


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 1), nn.Tanh(), nn.Conv2d(8, 4, 3)
    ).double()


def batches(count=1):
    """Batches of four; each rank takes its half of them."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(4, 3, 12, 12, dtype=torch.float64, generator=generator) for _ in range(count)
    ]


def mine(batch):
    rank = distributed.get_rank()
    return batch[2 * rank : 2 * rank + 2]


def backward(model, batch):
    model(batch).square().mean().backward()


def alone():
    """The gradients of one process, over the whole batch."""
    model = network()
    backward(model, batches()[0])
    return [parameter.grad for parameter in model.parameters()]


def worst(ones, others):
    return max((one - two).abs().max().item() for one, two in zip(ones, others, strict=True))


def off(gradients):
    return worst(gradients, alone())


def two_steps(model, batch, *, view=False, late=lambda model: None):
    """The warnings of torch in two steps of DDP; `late` is done to the model that was wrapped."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=view)
        late(model)
        for _ in range(2):
            wrapped.zero_grad()
            backward(wrapped, batch)
    return [str(one.message) for one in caught]


def refusal(act, *args):
    """Return the class and the text of the error that refuses `act`."""
    try:
        act(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def strides(model):
    return {name: parameter.stride() for name, parameter in model.named_parameters()}


# ------------------------------------------------------------------------------- DDP


def ddp(prepared, view):
    """Gradients under DDP, the warnings of torch, and whether gradients lie as their parameters do."""
    model = network()
    if prepared == "before":
        FLAT.apply(model)
        same_on_all_ranks(model)
        said = two_steps(model, mine(batches()[0]), view=view)
    else:
        convert = nn.utils.convert_conv2d_weight_memory_format
        said = two_steps(model, mine(batches()[0]), late=lambda m: convert(m, torch.channels_last))
    in_line = all(p.grad.stride() == p.stride() for p in model.parameters())
    gradients = [parameter.grad for parameter in model.parameters()]
    return said, off(gradients), in_line, model[0].weight.stride()


def every_kind(dimensions=2):
    """Convolutions whose weights have dimensions of size 1, and the norms between them."""
    torch.manual_seed(0)
    kinds = (f"Conv{dimensions}d", f"ConvTranspose{dimensions}d", f"BatchNorm{dimensions}d")
    plain, transposed, norm = (getattr(nn, kind) for kind in kinds)
    return nn.Sequential(
        plain(3, 8, 3, padding=1), norm(8), nn.ReLU(),
        plain(8, 8, 1), norm(8),
        plain(8, 8, 3, groups=8, padding=1),
        transposed(8, 4, 2, stride=2),
        transposed(4, 1, 1),
        plain(1, 4, 3),
    )  # fmt: skip


ALL_RANKS = {
    "conv2d_memory_format": {},
    "conv3d_memory_format": {},
    "repair_layout": {},
    "input_format": {"attach": True},
}


def ddp_every_kind(steps, dimensions, view):
    """The warnings of torch in two steps of DDP, for inputs in channels-last."""
    model = every_kind(dimensions)
    Pipeline.from_config(steps).apply(model, strict=False)
    last = torch.channels_last if dimensions == 2 else torch.channels_last_3d
    batch = torch.randn(2, 3, *(6,) * dimensions).to(memory_format=last)
    return two_steps(model, batch, view=view)


def rewritten_by_time():
    """The classes of the convolutions that are chosen by time, where each rank finds another one faster."""
    from prepare.steps.repairs import choose_rewrites

    first = distributed.get_rank() == 0

    def timed(timer, module, call, rewrites):
        return 1.0, {each.name: 0.5 if (module.bias is None) == first else 2.0 for each in rewrites}

    model = nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), nn.Conv2d(3, 3, 1)).double()
    true, choose_rewrites._Timer.timed = choose_rewrites._Timer.timed, timed
    try:
        pipeline = Pipeline.from_config({"rewrite_conv": {}})
        pipeline.apply(model, example=mine(batches()[0]))
        wrapped = DistributedDataParallel(model)
        late = refusal(
            lambda: Pipeline.from_config({"rewrite_conv": {}}).apply(
                wrapped, example=mine(batches()[0])
            )
        )
    finally:
        choose_rewrites._Timer.timed = true
    backward(wrapped, mine(batches()[0]))
    return [type(each).__name__ for each in model], late


def ddp_training():
    """The difference between three steps of a fused optimizer on two ranks and in one process."""
    reference = network()
    other = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    FLAT.apply(model, optimizer=optimizer)
    same_on_all_ranks(model)
    wrapped = DistributedDataParallel(model)
    for batch in batches(3):
        for each, its_optimizer, its_batch in (
            (wrapped, optimizer, mine(batch)),
            (reference, other, batch),
        ):
            its_optimizer.zero_grad()
            backward(each, its_batch)
            its_optimizer.step()
    drifts = FLAT.check(model, optimizer=optimizer)
    return worst(model.parameters(), reference.parameters()), drifts


def tuned(channels):
    """The winner of a tuning of which rank 0 alone may measure, or what refuses the tuning."""
    run, found = tune_model._Tuner.run, []
    batch = torch.ones(2, channels, 12, 12)
    if distributed.get_rank():
        tune_model._Tuner.run = None
    said = refusal(lambda: found.append(tune_model.tune(small(), batch, budget=0.5).winner))
    tune_model._Tuner.run = run
    return found, said


# ------------------------------------------------------------------------------- ranks that disagree


def layout(model):
    FLAT.apply(model)


def dtype(model):
    model[2].bfloat16()


def missing(model):
    model[0].bias = None


def order(model):
    model._modules["0"] = model._modules.pop("0")


def disagree(change, rank):
    """The text of the check if one rank made this change; the group works on afterwards."""
    model = network()
    if distributed.get_rank() == rank:
        change(model)
    said = refusal(same_on_all_ranks, model)
    total = torch.ones(())
    distributed.all_reduce(total)
    return said, total.item()


# ------------------------------------------------------------------------------- FSDP


def fsdp1(use_orig_params, strategy="FULL_SHARD"):
    """Strides that convolutions see in forward, those of their outputs, and how far gradients are off."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    model = FLAT.apply(network())
    seen = {}
    for name, module in model.named_children():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(
                lambda module, _, output, name=name: seen.update({name: (module.weight.stride(), output.stride())})
            )  # fmt: skip
    sharded = FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy[strategy],
    )  # fmt: skip
    backward(sharded, mine(batches()[0]))
    gradients = None
    if use_orig_params:
        with FullyShardedDataParallel.summon_full_params(sharded, with_grads=True):
            gradients = off([parameter.grad for parameter in sharded.parameters()])
    return seen, gradients


def _mesh():
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2,))


def fsdp2(steps):
    """The gradients' error under fully_shard, and the strides of each convolution's output."""
    from torch.distributed.fsdp import fully_shard

    pipeline = Pipeline.from_config(steps)
    model = pipeline.apply(network())
    seen = []
    for module in model:
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda _, __, output: seen.append(output.stride()))
    refused = refusal(lambda: fully_shard(model, mesh=_mesh()))
    if refused:
        return refused
    batch = mine(batches()[0])  # the step casts no float64
    backward(model, pipeline.format(batch.float() if "half" in steps else batch))
    return off([parameter.grad.full_tensor().double() for parameter in model.parameters()]), seen


# ------------------------------------------------------------------------------- too late


def wrapped_already(kind):
    """The error of `apply` for a wrapped model, and whether the model is unchanged."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model = network()
    if kind == "DDP":
        model = DistributedDataParallel(model)
    elif kind.startswith("FSDP1"):
        orig = kind.endswith("original parameters")
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=orig)
    else:
        fully_shard(model, mesh=_mesh())
    before = strides(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = [
        refusal(lambda: FLAT.apply(model)),
        refusal(lambda: FLAT.apply(model, optimizer=optimizer)),
        refusal(lambda: Pipeline.from_config({"half": {"dtype": "bfloat16"}}).apply(model)),
    ]
    if kind.startswith("FSDP1"):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save(network(), path := Path(folder, "weights.safetensors"))
            said.append(refusal(lambda: checkpoint.load(path, model)))
    return said, strides(model) == before
