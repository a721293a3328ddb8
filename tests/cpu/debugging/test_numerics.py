"""Numbers that overflow, vanish or are no numbers, planted in models: each is found, named, and comes with what to type."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaConfig, MixtralConfig, T5Config, TrainingArguments
from warm_processes import WarmProcesses

import upshift
from upshift import debugging
from upshift.debugging.finding import Finding
from upshift.debugging.half_precision import examine_fp16, stored_in_bf16
from upshift.errors import JobFailed, RequestError

HELPERS = Path(__file__).parents[1] / "helpers"

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "initializer_range": 0.5,
}  # fmt: skip
IDS = torch.arange(24).reshape(2, 12) % 60 + 2


def llama(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**(SIZES | more), num_key_value_heads=2))


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4))


def t5() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    return AutoModelForSeq2SeqLM.from_config(T5Config(**sizes, decoder_start_token_id=0, feed_forward_proj="gated-gelu"))


def watched(model: nn.Module, **named: Any) -> tuple[debugging.DebugUnderflowOverflow, list[str]]:
    lines: list[str] = []
    return debugging.DebugUnderflowOverflow(model, tell=lines.append, **named), lines


class Operators(TorchDispatchMode):
    """Counts operators while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **kwargs or {})


def overflow(model: nn.Module, **inputs: Any) -> tuple[Finding, list[str]]:
    debug, lines = watched(model)
    with pytest.raises(debugging.NumericsError) as raised:
        model(**inputs)
    assert raised.value.finding is not None
    assert debug.findings[-1] == raised.value.finding
    return raised.value.finding, lines


# module: an output of it is beyond 65,504 once its weight has grown
@pytest.mark.parametrize(
    ("build", "module", "block"),
    [
        (llama, "model.layers.1.mlp.down_proj", "model.layers.1"),
        (t5, "encoder.block.1.layer.1.DenseReluDense.wo", "encoder.block.1.layer.1"),
        (t5, "decoder.block.0.layer.2.DenseReluDense.wo", "decoder.block.0.layer.2"),
        (mixtral, "model.layers.1.mlp.experts", "model.layers.1"),
    ],
    ids=["decoder", "encoder of two", "decoder of two", "experts"],
)
def test_an_overflow_in_a_chosen_layer(build: Any, module: str, block: str) -> None:
    model = build().eval()
    inputs = {"input_ids": IDS} | ({"labels": IDS} if build is t5 else {})
    with torch.no_grad():
        for parameter in model.get_submodule(module).parameters():
            parameter.fill_(6e4)
    model.half()
    finding, lines = overflow(model, **inputs)
    assert finding.what.startswith(f"{module} ") and "of finite numbers" in finding.what, finding
    assert f"keep_in_fp32(model, '{block}')" in (finding.fix or "")
    assert any("inf output" in line or "nan output" in line for line in lines[0].splitlines()[-4:])


def test_what_was_kept_in_fp32_overflows_no_more() -> None:
    model = llama().eval()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(3e4)
        model.model.layers[1].mlp.down_proj.weight.mul_(1e-3)
    model.half()
    finding, _ = overflow(model, input_ids=IDS)
    assert "model.layers.1.mlp" in finding.what
    for module in model.modules():
        module._forward_hooks.clear(), module._forward_pre_hooks.clear()
    debugging.keep_in_fp32(model, "model.layers.1.mlp")
    watched(model)
    assert torch.isfinite(model(input_ids=IDS).logits).all()
    with pytest.raises(RequestError, match=r"no module 'layers.1.mlp'; it has model.layers.0.mlp"):
        debugging.keep_in_fp32(model, "layers.1.mlp")


def test_a_batch_of_nan() -> None:
    model = llama().eval()
    embeddings = torch.randn(1, 4, 32)
    embeddings[0, 2, 5] = torch.nan
    finding, _ = overflow(model, inputs_embeds=embeddings)
    assert "the batch itself holds NaN" in finding.what
    assert "drop its rows" in (finding.fix or "")


def test_a_weight_of_nan_is_found_before_the_forward_pass() -> None:
    model = llama().eval()
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[3, 3] = torch.nan
    finding, _ = overflow(model, input_ids=IDS)
    assert finding.what == "weight of model.layers.0.self_attn.k_proj (Linear) is NaN before the forward pass"


def test_an_underflow() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).half()
    with torch.no_grad():
        model[0].weight.fill_(1e-4)
        model[1].weight.fill_(1e-6)
    debug, _ = watched(model)
    model(torch.full((2, 8), 1e-1).half())
    assert [(f.severity, f.subject) for f in debug.findings] == [("warning", "1")]
    assert "underflow: output of Linear is all zero of float16" in debug.findings[0].what
    assert "keep_in_fp32(model, '1')" in (debug.findings[0].fix or "")


def test_it_warns_before_the_overflow() -> None:
    """A block whose output doubles every two batches is named while it is still far from 65,504."""
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)])})
    model.forward = lambda x: model["layers"][1](model["layers"][0](x))
    model.half()
    debug, _ = watched(model)
    with torch.no_grad():
        model["layers"][0].weight.fill_(0.1)
        model["layers"][1].weight.fill_(30)
    said = None
    for batch in range(40):
        try:
            model(torch.ones(1, 8).half())
        except debugging.NumericsError:
            break
        if debug.findings and said is None:
            said = batch
        with torch.no_grad():
            model["layers"][1].weight.mul_(2**0.5)
    assert said is not None and said <= batch - 4
    assert debug.findings[0].subject == "layers.1"
    assert "gets there in some" in debug.findings[0].what
    assert "keep_in_fp32(model, 'layers.1')" in (debug.findings[0].fix or "")


def test_tracing_says_every_frame_of_the_batches_asked_for() -> None:
    model = llama().eval()
    debug, lines = watched(model, trace_batch_nums=[1], abort_after_batch_num=2)
    model(input_ids=IDS)
    assert lines == []
    model(input_ids=IDS)
    assert lines[0].startswith("batch 1")
    assert sum("LlamaDecoderLayer" in line for line in lines) == 2
    assert any(line.endswith("model.embed_tokens Embedding") for line in lines)
    with pytest.raises(ValueError, match="abort_after_batch_num=2"):
        model(input_ids=IDS)
    debug.remove()
    model(input_ids=IDS)
    with pytest.raises(RequestError, match="max_frames_to_save"):
        watched(model, max_frames_to_save=0)


def test_masks_of_minus_infinity_are_no_overflow() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return (x + attention_mask).softmax(-1)

    model = nn.ModuleDict({"inner": Masked()})
    model.forward = lambda x, attention_mask: model["inner"](x, attention_mask=attention_mask)
    watched(model)
    model(torch.zeros(2, 2), attention_mask=torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]))
    with pytest.raises(JobFailed, match="the batch itself holds inf"):
        model(torch.zeros(2, 2), attention_mask=torch.tensor([[0.0, torch.inf], [0.0, 0.0]]))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()) + x


@pytest.mark.parametrize("compiled", ["layers", "module", "whole"])
def test_compiled(compiled: str) -> None:
    torch._dynamo.reset()
    model: nn.Module = nn.Sequential(Layer(), Layer())
    if compiled == "whole":
        layers, model = list(model), torch.compile(model, backend="aot_eager")
    else:
        layers = list(model)
    debug, _ = watched(model)
    for module in {"layers": layers, "module": [model], "whole": []}[compiled]:
        module.compile(backend="aot_eager")
    x = torch.ones(2, 8)
    for _ in range(3):
        model(x)
    counters = dict(torch._dynamo.utils.counters["stats"])
    model(x)
    assert dict(torch._dynamo.utils.counters["stats"]) == counters  # nothing is compiled again
    with torch.no_grad():
        layers[1].up.weight.fill_(3e38)
    with pytest.raises(debugging.NumericsError) as raised:
        model(x)
    assert raised.value.finding is not None
    assert raised.value.finding.what.removeprefix("_orig_mod.").startswith("1.up (Linear) makes")
    assert debug.batch_number == 4
    torch._dynamo.reset()


def test_recomputed_layers_are_looked_at_once() -> None:
    model = llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    debug, _ = watched(model)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert debug.batch_number == 1


def test_detect_overflow() -> None:
    lines: list[str] = []
    assert not debugging.detect_overflow(torch.ones(3), "x", tell=lines.append)
    assert debugging.detect_overflow(torch.tensor([1.0, torch.inf, torch.nan, 7.0]), "after attention", tell=lines.append)
    assert lines == ["after attention has 1 NaN and 1 inf of 4 numbers, the rest up to 7 (float32)"]


def test_weights_of_bf16_training_are_known_before_fp16() -> None:
    fresh = llama()
    assert not stored_in_bf16(fresh)
    assert examine_fp16(fresh) is None
    stored = fresh.to(torch.bfloat16).float()
    found = examine_fp16(stored)
    assert found is not None and "bf16=True" in (found.fix or "")
    with torch.no_grad():
        stored.lm_head.weight.mul_(1.0001)  # one step of fp32 training
    assert not stored_in_bf16(stored)


def test_overhead() -> None:
    """In operators of a training step, whose number no other program changes. The first step also looks at the weights."""
    model = llama(hidden_size=256, intermediate_size=688, num_attention_heads=4, num_hidden_layers=2).train()
    ids = torch.randint(0, 64, (4, 128))

    def step() -> int:
        with Operators() as run:
            model(input_ids=ids, labels=ids).loss.backward()
        return run.count

    plain = step()
    debug, _ = watched(model)
    debugged = [step(), step()]
    debug.remove()
    print(f"underflow_overflow: {plain} operators, then {debugged}")
    assert plain < debugged[1] <= debugged[0] < 2 * plain
    assert step() == plain


def test_ranks_of_every_layout_find_it_where_it_runs(tmp_path: Path, warm_processes: WarmProcesses) -> None:
    """Fully sharded and tensor-parallel ranks all find it; of a pipeline's, the one that has the layer."""
    world = HELPERS / "debugged_ranks.py"
    warm_processes.run(world, str(tmp_path), timeout=300).check_returncode()
    found = {layout.name: {rank.name: json.loads(rank.read_text()) for rank in layout.iterdir()} for layout in tmp_path.iterdir()}
    words = "model.layers.1.mlp.up_proj (Linear) makes inf of finite numbers"
    assert found == {"fully_shard": {"0": words, "1": words}, "pipeline": {"1": words}, "tensor": {"0": words, "1": words}}


def test_the_trainer_honours_debug(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path / "cache"))
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.fill_(3e38)
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), debug="underflow_overflow", max_steps=2, per_device_train_batch_size=2,
        report_to=[], save_strategy="no", use_cpu=True,
    )  # fmt: skip
    data = [{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in IDS] * 4
    trainer = upshift.Trainer(model, arguments, train_dataset=data, trial_seconds=0.0)
    with pytest.raises(JobFailed, match=r"step 1: batch 0: model.layers.1.mlp.up_proj \(Linear\) makes inf"):
        trainer.train()
    assert "model.layers.1.mlp.up_proj Linear" in capsys.readouterr().err
    assert arguments.debug == ["underflow_overflow"] and not model._forward_pre_hooks


def test_the_package_loads_torch_when_used() -> None:
    assert importlib.import_module("upshift.debugging").keep_in_fp32 is debugging.keep_in_fp32
    with pytest.raises(AttributeError):
        _ = debugging.nothing
