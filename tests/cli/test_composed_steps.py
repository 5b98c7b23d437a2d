"""The steps that the words of a command line compose: order, options, dropped and added steps."""

import yaml

from commands import NET, SMALL


def composed(go, *argv):
    ran = go(*argv, "--cfg", "job")
    assert ran.code == 0, ran.err
    return yaml.safe_load(ran.out)


def test_the_steps_stand_in_one_order_whatever_the_order_of_the_words(go):
    words = ["memfmt=by_rank", "precision=half", "device=cpu", "model=unet3d"]
    expected = ["device", "half", "conv2d_memory_format", "conv3d_memory_format"]
    assert list(composed(go, *words)["steps"]) == expected
    assert list(composed(go, *reversed(words))["steps"]) == expected


def test_options_are_set_steps_dropped_added_and_moved(go):
    base = ("model=unet3d", "precision=half", "memfmt=channels_last_3d")
    assert composed(go, *base, "steps.half.keep=[]")["steps"]["half"]["keep"] == []
    assert composed(go, *base, "steps.half=null")["steps"]["half"] is None
    assert composed(go, *base, "+steps.input_format={}")["steps"]["input_format"] == {}
    moved = composed(go, *base, "~steps.device", "+steps.device={device: cpu}")["steps"]
    assert list(moved) == ["half", "conv3d_memory_format", "device"]
    assert "half" not in composed(go, *base, "~precision")["steps"]


def test_a_dropped_step_does_nothing(go):
    ran = go(
        NET,
        SMALL,
        "precision=half",
        "steps.half=null",
        "~steps.device",
        "+steps.device={device: cpu}",
    )
    assert ran.code == 0, ran.err
    assert "2 float32" in ran.out


def test_the_precision_float32_refuses_a_model_that_is_something_else(go):
    ran = go(NET, "+model.dtype=bfloat16", "+model.depth=2")
    assert ran.code == 2
    assert ran.err == (
        "precision: float32 adds no step, and the model holds 4 tensors that are not: "
        "convs.0.weight (bfloat16), convs.0.bias (bfloat16), convs.1.weight (bfloat16), ...; build it in "
        "float32, or choose precision=bfloat16 or half; ~precision drops this check\n"
    )
    assert go(NET, "+model.dtype=bfloat16", "~precision").code == 0
