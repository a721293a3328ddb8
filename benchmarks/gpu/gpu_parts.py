"""List the parts of the GPU check in their order, with the time that each may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from upshift.errors import RequestError


@dataclass(frozen=True)
class Part:
    """A part: what it shows, the module and function that do it, and its limit in seconds, which --minutes scales.

    needs: parts whose results it uses, which run before it. gpus: the fewest GPUs that it needs. all_gpus: it sees every GPU;
    else it sees one, because Trainer would compute other batches on several (DataParallel), and a plan would use them all.
    """

    name: str
    shows: str
    seconds: float
    function: str
    needs: tuple[str, ...] = ()
    gpus: int = 1
    all_gpus: bool = False


MINUTES = 17.0  # of all limits together
PARTS = (
    Part("facts", "driver, GPUs, torch, compiler, and what upshift doctor finds", 15, "gpu_machine:read_facts", all_gpus=True),
    Part("probe", "rates by precision, fp8, bandwidth, exchanges between GPUs", 30, "gpu_machine:probe_rates", all_gpus=True),
    Part("tests", "the tests of tests/gpu", 150, "gpu_machine:run_tests"),
    Part("data", "the models and the tokens of the parts below", 20, "gpu_data:write_data"),
    Part("train", "upshift train of 125 M parameters, by a plan that trials choose", 110, "gpu_training:train_small", ("data",)),
    Part("train-large", "the same of 0.5 B or 1.5 B, by the GPU's memory", 140, "gpu_training:train_large", ("data",)),
    Part("trainer-plain", "transformers.Trainer with its defaults", 30, "gpu_training:run_plain", ("train",)),
    Part("trainer-careful", "Trainer, 16 bits, compiled, fused AdamW, packed", 60, "gpu_training:run_careful", ("train",)),
    Part("trainer-liger", "Trainer, 16 bits, fused AdamW, packed, Liger's kernels", 35, "gpu_training:run_liger", ("train",)),
    Part("settings", "nine settings by hand, and the plan, of speed and memory", 110, "gpu_training:run_settings"),
    Part("encode", "the race of encoding engines against transformers", 60, "gpu_inference:race_encoding"),
    Part("generate", "the race of generation engines against transformers", 75, "gpu_inference:race_generation"),
    Part("layout-one", "upshift train on one GPU, whose losses the layouts below must have", 32, "gpu_layouts:train_one",
         ("data",), 2, all_gpus=True),
    Part("layout-data", "data parallel on all GPUs", 32, "gpu_layouts:train_data_parallel", ("layout-one",), 2, all_gpus=True),
    Part("layout-zero3", "ZeRO 3 on all GPUs", 32, "gpu_layouts:train_zero3", ("layout-one",), 2, all_gpus=True),
    Part("layout-tensor", "tensor parallel on two GPUs", 32, "gpu_layouts:train_tensor_parallel", ("layout-one",), 2,
         all_gpus=True),
)  # fmt: skip
NAMES = tuple(part.name for part in PARTS)


def choose_parts(names: str | None) -> Sequence[Part]:
    """Return the named parts and the parts that they need, in order. None: all. Raise RequestError for an unknown name."""
    if names is None:
        return PARTS
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in NAMES:
            raise RequestError(f"--only has no part {name!r}; the parts are {', '.join(NAMES)}")
    by_name = {part.name: part for part in PARTS}
    needed = set(chosen)
    for name in reversed(NAMES):  # a part comes after the parts that it needs
        if name in needed:
            needed.update(by_name[name].needs)
    return [part for part in PARTS if part.name in needed]
