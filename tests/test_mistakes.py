"""Every way to get the configuration wrong, and exactly what is said to it; no run is started."""

from pathlib import Path

import pytest

from prepare import hydra as ours
from prepare.registry import STEPS
from prepare.settings import GROUPS

CONF = Path(ours.__file__).resolve().parent.parent / "conf"
MODELS = ", ".join(sorted(path.stem for path in CONF.glob("model/*.yaml")))
OWN = MODELS.replace("custom, ", "")
KEYS = "model, device, precision, memfmt, input"
FORMATS = "by_rank, channels_last, channels_last_3d, contiguous"
ALL_STEPS = ", ".join(STEPS)
DTYPES = "float16, bfloat16, float32, float64, int64, int32, int16, int8, uint8, bool, complex64, complex128"
NO_MODEL = (
    "model: none is chosen; choose model=NAME, or give your own as "
    f"model._target_=package.module.name; models: {OWN}"
)
# What is given, and every line of what is said.
WRONG = [
    ([], [NO_MODEL]),
    (["~model"], [NO_MODEL]),
    (["model=unet3dd"], [f"model: there is no option 'unet3dd'; did you mean 'unet3d'? options: {MODELS}"]),
    (["modle=unet3d"], [f"modle: no such key; did you mean 'model'? keys and groups: {KEYS}, hydra, task, mode, strict, plugins, seed, steps"]),
    (["model=unet3d", "memfmt=chanels_last"], [f"memfmt: there is no option 'chanels_last'; did you mean 'channels_last'? options: {FORMATS}"]),
    (["model=unet3d", "memfmt=[a,b]"], ["memfmt: takes one option, and not the list [a,b]; with --multirun, memfmt=a,b runs each of them"]),
    (["model=unet3d", "memfmt={a: b}"], ["memfmt: takes the name of an option, and not a mapping; choose memfmt=NAME, and set a key as steps.KEY=value"]),
    (["model=unet3d", "memfmt=null"], ["memfmt: null is no option; ~memfmt drops the choice"]),
    (["model=unet3d", "memfmt=contiguous,by_rank"], ["memfmt: 'contiguous,by_rank' is several values; add --multirun for a run of each, or write a list as [a,b]"]),
    (["model=unet3d", "+memfmt=by_rank"], ["memfmt: is chosen already; write memfmt=by_rank once, without the +"]),
    (["model=unet3d", "precision=hlf"], ["precision: there is no option 'hlf'; did you mean 'half'? options: bfloat16, float32, half"]),
    (["model=unet3d", "device=gpu"], ["device: there is no option 'gpu'; did you mean 'cuda'? options: auto, cpu, cuda, mps"]),
    (["model=unet3d", "precision=float16"], ["precision: there is no option 'float16'; did you mean 'half'? options: bfloat16, float32, half"]),
    (["model=unet3d", "precision=bf16"], ["precision: there is no option 'bf16'; did you mean 'bfloat16'? options: bfloat16, float32, half"]),
    (["model=unet3d", "memfmt=NHWC"], [f"memfmt: there is no option 'NHWC'; did you mean 'channels_last'? options: {FORMATS}"]),
    (["model=unet3d", "hydra.job.chdir=maybe"], ["hydra.job.chdir: Value 'maybe' is not a valid bool (type str)"]),
    (["model=unet3d", "model=unet2d,unet3d"], ["model: 'unet2d,unet3d' is several values; add --multirun for a run of each, or write a list as [a,b]"]),
    (["model=unet3d", "+steps.half.keep=[norms]", "+steps.half.x=1"], ["steps.half.x: no such option; options: dtype, keep"]),
    (["model=unet3d", "steps=half"], [f"steps: cannot be set as a whole; add one as +steps.NAME={{}}, set an option as steps.NAME.OPTION=value; steps: {ALL_STEPS}"]),
    (["model=unet3d", "steps.device.device=gpuu"], ["steps.device.device: 'gpuu' is no device; did you mean 'xpu'? allowed: auto, cpu, cuda, mps, xpu, meta"]),
    (["model=unet3d", "input=volum"], ["input: there is no option 'volum'; did you mean 'volume'? options: image, tokens, volume"]),
    (["model=unet3d", "+typo=1"], [f"typo: no such key; keys and groups: {KEYS}, steps, task, mode, strict, plugins, seed"]),
    (["model=unet3d", "+memfnt=channels_last"], [f"memfnt: no such key; did you mean 'memfmt'? keys and groups: {KEYS}, steps, task, mode, strict, plugins, seed"]),
    (["model=unet3d", "model.dpth=3"], ["model.dpth: this model's configuration has no such key; did you mean 'depth'? a keyword it does not list is added as +model.dpth=3"]),
    (["model=unet3d", "steps.half.keep=[]"], ["steps.half: this pipeline has no such step, it holds device; add it with precision=half or +steps.half={}"]),
    (["model=unet3d", "~steps.half"], ["steps.half: this pipeline has no such step, it holds device; add it with precision=half or +steps.half={}"]),
    (["model=unet3d", "steps.hlf.keep=[]"], [f"steps.hlf: no such step; did you mean 'half'? steps: {ALL_STEPS}"]),
    (["model=unet3d", "+steps.hlf={}"], [f"steps.hlf: no such step; did you mean 'half'? steps: {ALL_STEPS}"]),
    (["model=unet3d", "+steps.half=1"], ["steps.half: 1 is no mapping of options; give {} or null"]),
    (["model=unet3d", "precision=half", "steps.half.kep=[]"], ["steps.half.kep: no such key; did you mean 'keep'? keys: dtype, keep"]),
    (["model=unet3d", "precision=half", "+steps.half.kep=[]"], ["steps.half.kep: no such option; did you mean 'keep'? options: dtype, keep"]),
    (["model=unet3d", "precision=half", "steps.half.dtype=float15"], ["steps.half.dtype: 'float15' is not allowed; did you mean 'float16'? allowed: float16, bfloat16"]),
    (["model=unet3d", "task=plam"], ["task: 'plam' is not allowed; did you mean 'plan'? allowed: prepare, plan"]),
    (["model=unet3d", "mode=evil"], ["mode: 'evil' is not allowed; did you mean 'eval'? allowed: eval, train"]),
    (["model=unet3d", "strict=1"], ["strict: 1 is not true or false; give true or false"]),
    (["model=unet3d", "seed=x"], ["seed: 'x' is not a whole number; give a whole number"]),
    (["model=unet3d", "seed=-1e30"], ["seed: -1e+30 is not a whole number; give a whole number"]),
    (["model=unet3d", "seed=99999999999999999999"], ["seed: 99999999999999999999 is out of range; give one from 0 to 9223372036854775807"]),
    (["model=unet3d", "seed.x=1"], ["seed.x: seed is a value and has no keys; set it as seed=value"]),
    (["model=unet3d", "+seed=1"], ["seed: is there already; write seed=1"]),
    (["model=unet3d", "sed=1"], [f"sed: no such key; did you mean 'seed'? keys and groups: {KEYS}, hydra, task, mode, strict, plugins, seed, steps"]),
    (["model=unet3d", "plugins={a: b}"], ["plugins: {a: b} is no list; write plugins=[a,b]"]),
    (["model._target_=3"], ["model._target_: 3 is no dotted name; give the dotted name of a class or function, as in my_package.nets.build"]),
    (["model._target_=a..b"], ["model._target_: 'a..b' is no dotted name; give the dotted name of a class or function, as in my_package.nets.build"]),
    (["model=unet3d", "+model.x=???"], ["model.x: has no value yet (???); set model.x=value"]),
    (["model=unet3d", "seed=${oc.env:NOT_SET_ANYWHERE}"], ["seed: ${oc.env:NOT_SET_ANYWHERE} cannot be resolved: Environment variable 'NOT_SET_ANYWHERE' not found"]),
    (["model=unet3d", "seed=${sed}"], ["seed: ${sed} cannot be resolved: Interpolation key 'sed' not found"]),
    (["model=unet3d", "input.shape=[1,x]"], ["input.shape: [1, 'x'] is no list of whole numbers; give a list of sizes, as in [2,3,64,64]"]),
    (["model=unet3d", "input.shape=[1,0]"], ["input.shape: [1, 0] holds a size below 1; give a list of sizes, as in [2,3,64,64]"]),
    (["model=unet3d", "input.dtype=flot32"], [f"input.dtype: 'flot32' is no dtype; did you mean 'float32'? allowed: {DTYPES}"]),
    (["model=unet3d", "input.dtype=int64"], ["input.high: is missing for int64; give how many values there are, as in high: 1000"]),
    (["model=unet3d", "input.shap=[1]"], ["input.shap: no such key; did you mean 'shape'? keys: shape, dtype, low, high, args, kwargs"]),
    (["model=unet3d", "+input.shap=[1]"], ["input.shap: no such key; did you mean 'shape'? keys: shape, dtype, low, high, args, kwargs"]),
    (["model=unet3d", "input.args=[{shape: [1], dtpe: x}]"], ["input.shape: this model takes input.args; change input.args, or drop them with input.args=null", "input.args[0].dtpe: no such key; did you mean 'dtype'? keys: shape, dtype, low, high"]),
    (["unet3d"], ["unet3d: is neither key=value nor a command; did you mean model=unet3d? see --help"]),
    (["model=unet3d", "step"], ["step: is neither key=value nor a command; did you mean steps? see --help"]),
    (["model=unet3d", "=3"], ["=3: no key stands before the =; write key=value, without spaces"]),
    (["model=unet3d", "model.name=a=b{"], ["model.name: the value 'a=b{' cannot be read; quote a value that holds special characters: 'model.name=\"a=b{\"'"]),
    (
        ["model=unet3dd", "memfmt=channels_lst", "seed=x", "+typo=1", "input.shape=2", "model.depth=1"],
        [
            f"model: there is no option 'unet3dd'; did you mean 'unet3d'? options: {MODELS}",
            f"memfmt: there is no option 'channels_lst'; did you mean 'channels_last'? options: {FORMATS}",
            f"typo: no such key; keys and groups: {KEYS}, steps, task, mode, strict, plugins, seed",
            "seed: 'x' is not a whole number; give a whole number",
        ],
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def composer():
    with ours.composing() as composer:
        yield composer


@pytest.mark.parametrize(("argv", "lines"), WRONG, ids=[" ".join(argv) for argv, _ in WRONG])
def test_a_mistake_in_the_configuration_is_said_exactly(composer, argv, lines):
    assert [str(problem) for problem in composer.diagnose(argv, multirun=False)] == lines


@pytest.mark.parametrize(
    ("group", "option"),
    [
        (path.parent.name, path.stem)
        for path in sorted(CONF.glob("*/*.yaml"))
        if path.parent.name in GROUPS
    ],
)
def test_every_option_of_every_group_composes_without_a_mistake(composer, group, option):
    overrides = [f"{group}={option}"] if group == "model" else ["model=unet3d", f"{group}={option}"]
    if option == "custom":
        overrides.append("model._target_=my_package.nets.build")
    assert composer.examine([overrides]) == []


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["model=unet3d,unet2dd"], "model: there is no option 'unet2dd'; did you mean 'unet2d'?"),
        (["memfmt=contiguous,channels_last"], "model: none is chosen; "),
        (["model=unet3d", "sed=0,1"], "sed: no such key; did you mean 'seed'?"),
        (["model=unet3d", "+typo=0,1"], "typo: no such key; "),
        (["model=unet3d", "task=plan,pln", "seed=0,1,2"], "task: 'pln' is not allowed; "),
    ],
)
def test_a_mistake_in_any_row_of_a_sweep_is_named_once(composer, argv, line):
    (problem,) = composer.diagnose(argv, multirun=True)
    assert str(problem).startswith(line)
