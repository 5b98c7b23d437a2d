"""Test that a guard changes neither the model nor its results, also after an interrupt."""

import copy
import pickle
import random
import signal
import threading

import numpy as np
import pytest
import torch
from torch import nn

from guarded import ALL, images, prepared
from prepare.core.utils.process_state import PROCESS_STATE
from prepare.pipeline import Pipeline
from prepare.testing.networks import facts


def states():
    numbers = np.random.get_state()[1].tolist()  # noqa: NPY002
    return random.getstate(), torch.get_rng_state().tolist(), numbers


def test_a_look_changes_neither_the_model_nor_random_numbers():
    pipeline, model = prepared()
    batch = images()
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    before = facts(model), states()
    with torch.no_grad():
        plain = model(batch)
        with pipeline.guard(model) as guard:
            looked_at = model(batch)
    assert guard.looks > 6
    assert torch.equal(plain, looked_at)
    assert (facts(model), states()) == before
    assert nn.Module.__call__.__name__ == "_wrapped_call_impl"


def test_training_with_looks_ends_in_the_same_weights():
    def trained(*, guarded):
        pipeline, model = prepared(training=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        guard = pipeline.guard(model, every=1, share=ALL) if guarded else lambda: None
        torch.manual_seed(2)
        for _ in range(4):
            model(images()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            guard()
        assert not guarded or guard.looks > 20
        return model.state_dict()

    looked_at, plain = trained(guarded=True), trained(guarded=False)
    assert all(torch.equal(looked_at[name], plain[name]) for name in plain)


def test_a_removed_guard_leaves_no_hook():
    pipeline, model = prepared()
    before = facts(model)
    guard = pipeline.guard(model)
    assert facts(model) != before
    guard.remove()
    assert facts(model) == before
    with torch.no_grad():
        model(images())
    assert guard.looks == 0


def test_a_copy_of_a_guarded_model_is_not_guarded(tmp_path):
    pipeline, model = prepared()
    guard = pipeline.guard(model)
    copied, unpickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    batch = images()
    with torch.no_grad():
        outputs = [each(batch) for each in (copied, unpickled, loaded)]
        assert guard.looks == 0
        assert all(torch.equal(out, model(batch)) for out in outputs)
        again = pipeline.guard(copied)
        copied(batch)
    assert again.looks == guard.looks > 0


def test_an_error_of_the_model_ends_the_look():
    pipeline, model = prepared()
    with pipeline.guard(model) as guard, torch.no_grad():
        with pytest.raises(RuntimeError, match="expected input"):
            model(torch.randn(2, 5, 16, 16))
        assert nn.Module.__call__.__name__ == "_wrapped_call_impl"
        model(images())
        assert guard.looks > 6


class Stops(nn.Module):
    """Calls `stop` between its modules."""

    def __init__(self):
        super().__init__()
        self.conv, self.inner, self.stop = nn.Conv2d(3, 4, 3), nn.Identity(), lambda: None

    def forward(self, x):
        x = self.conv(x)
        self.stop()
        return self.inner(x)


def raise_interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("where", ["module", "signal", "model"])
def test_an_interrupt_of_the_model_ends_the_look(where, training):
    pipeline = Pipeline.from_config({"conv2d_memory_format": {}})
    model = pipeline.apply(Stops().train(training))
    with pipeline.guard(model, every=1, share=ALL) as guard, torch.set_grad_enabled(training):
        if where == "module":
            model.inner.forward = raise_interrupt
        else:
            signalled = lambda: signal.raise_signal(signal.SIGINT)  # noqa: E731
            model.stop = signalled if where == "signal" else raise_interrupt
        with pytest.raises(KeyboardInterrupt):
            model(images())
        if where != "model":  # torch runs no hook then: the next call ends the look
            assert nn.Module.__call__.__name__ == "_wrapped_call_impl"
            assert is_free(PROCESS_STATE)
        model.stop = lambda: None
        vars(model.inner).pop("forward", None)
        output = model(images())
        output.square().mean().backward() if training else None
        guard()
        assert guard.looks >= 3
    assert nn.Module.__call__.__name__ == "_wrapped_call_impl"
    assert is_free(PROCESS_STATE)
    other, another = prepared()
    with torch.no_grad(), other.guard(another) as guard:
        another(images())
        assert guard.looks == len(guard.watched)


def is_free(lock):
    """Return whether another thread can hold the lock."""

    def hold():
        with lock:
            pass

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    thread.join(10)
    return not thread.is_alive()


def test_two_threads_that_serve_are_both_right():
    pipeline, model = prepared()
    batches = [images(size) for size in (12, 14, 16, 18)]
    with torch.no_grad():
        expected = [model(batch) for batch in batches]
    guard, wrong = pipeline.guard(model), []

    def serve(order):
        with torch.no_grad():
            same = [torch.equal(model(batches[index]), expected[index]) for index in order * 3]
            wrong.extend(
                index for index, is_same in zip(order * 3, same, strict=True) if not is_same
            )

    threads = [threading.Thread(target=serve, args=(o,)) for o in ([0, 1, 2, 3], [3, 2, 1, 0])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert guard.differences == []
    assert guard.looks == 4 * len(guard.watched)
