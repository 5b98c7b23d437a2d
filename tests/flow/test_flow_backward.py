"""Test the flow of gradients in backward."""

import pytest
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flow_checks import BOTH, Net, breaks, cl


@BOTH
def test_the_gradient_of_an_instance_norm_is_followed_in_backward(flow_of):
    net = Net(lambda net, x: net.norm(x), norm=nn.InstanceNorm2d(4))
    flow = flow_of(net, cl(2, 4, 8, 8), backward=True)
    assert [module for module, *_ in breaks(flow, "backward")] == ["norm"]
    assert breaks(flow) == breaks(flow_of(net, cl(2, 4, 8, 8)))
    assert flow.summary["backward"]["copied_bytes"] > 0


@BOTH
def test_wrong_gradients_of_one_normed_sample_are_reported(flow_of):
    net = Net(lambda net, x: F.silu(net.norm(x)), norm=nn.InstanceNorm2d(4))
    flow = flow_of(net, cl(1, 4, 8, 8), backward=True)
    assert any(
        note.startswith("norm: grad_out of aten.native_batch_norm_backward has strides")
        and note.endswith("torch is known to compute wrong gradients there")
        for note in flow.notes
    )
    assert flow_of(net, cl(2, 4, 8, 8), backward=True).notes == ()


@BOTH
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_checkpoint_adds_no_break_to_forward(flow_of, reentrant):
    def inside(net, x):
        if not net.is_checkpointed:
            return net.norm(x)
        return checkpoint(net.norm, x, use_reentrant=reentrant)

    net = Net(inside, norm=nn.InstanceNorm2d(4))
    net.is_checkpointed = False
    direct = flow_of(net, cl(2, 4, 8, 8), backward=True)
    net.is_checkpointed = True
    flow = flow_of(net, cl(2, 4, 8, 8), backward=True)
    assert breaks(flow) == breaks(direct) == [("norm", "aten.clone", "instance_norm")]
    assert breaks(flow, "backward") == breaks(direct, "backward")
    assert {event.phase for event in flow.events} == {"forward", "backward"}
    assert [m.calls for m in flow.modules] == [1, 1, 1, 1]
    # The copy is made once more, and in backward.
    copies = [sum(c.count for c in f.copies if (c.module, c.phase) == ("norm", "backward"))
              for f in (direct, flow)]  # fmt: skip
    assert copies == [1, 2]


@BOTH
def test_a_model_without_gradients_notes_the_missing_backward(flow_of):
    net = Net(lambda net, x: x).requires_grad_(requires_grad=False)
    flow = flow_of(net, cl(2, 4, 8, 8), backward=True)
    assert flow.notes == ("no output requires a gradient, so no backward was followed",)
