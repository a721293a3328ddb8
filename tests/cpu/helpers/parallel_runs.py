"""Real gloo ranks that train a tiny model in some layout, through upshift's own Stepper, and one process that trains the same.

A test asks for ``run(cases)``: one Python process imports everything once and forks a world for each number of ranks; every
world runs its cases one after the other. Cases and their results cross the border as JSON. If a case fails or hangs, its world
ends, and a new one runs the cases that are left.

What a case costs grows with its exchanges, so jobs are short: two layers, unless the property needs more, and three steps, of
which the last is in the second epoch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

GLOBAL_BATCH, LENGTH, VOCABULARY, STEPS, SEQUENCES = 8, 32, 96, 3, 16
CASE_SECONDS = 200.0  # a case that takes longer hangs
POLL_SECONDS = 0.1
LAST_WORDS = 5000  # characters of the ranks' errors that a test shows
RunScript = Callable[[str, str, str], subprocess.CompletedProcess[str]]
LAYERS = ("num_hidden_layers", "n_layer")
OPTIONS = {"max_steps": STEPS, "learning_rate": 3e-3, "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.5}
WIDTHS = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
SMALL = WIDTHS | {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
GLU = SMALL | {"intermediate_size": 64, "num_key_value_heads": 2}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GLU),
    "llama with dropout": ("LlamaConfig", GLU | {"attention_dropout": 0.1}),
    "qwen2 tied": ("Qwen2Config", GLU | {"tie_word_embeddings": True}),
    "gpt2": (
        "GPT2Config",
        {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
    "bert": (
        "BertConfig",
        SMALL | {"intermediate_size": 64} | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    ),
    "t5": (
        "T5Config",
        {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY, "dropout_rate": 0.0,
         "decoder_start_token_id": 0},
    ),
    "mixture": (
        "Qwen3MoeConfig",
        GLU | {"moe_intermediate_size": 32, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": []},
    ),
    "opt": (  # declares no plan
        "OPTConfig",
        SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0},
    ),
    "opt without layers": (  # all are left out in training, and run in evaluation
        "OPTConfig",
        SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 1.0},
    ),
    # Nothing was made with these in mind.
    "gpt neox": ("GPTNeoXConfig", SMALL | {"intermediate_size": 64}),
    "gemma2": ("Gemma2Config", GLU | {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8}),
    "bloom": ("BloomConfig", {"hidden_size": 32, "n_layer": 4, "n_head": 4, "vocab_size": VOCABULARY}
              | dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0)),
    "mamba": ("MambaConfig", WIDTHS | {"vocab_size": VOCABULARY, "state_size": 4}),
    "electra": (
        "ElectraConfig",
        SMALL | {"intermediate_size": 64, "embedding_size": 16}
        | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    ),
    "whole experts": (  # no plan of experts that are shared
        "GraniteMoeConfig", GLU | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "apertus": ("ApertusConfig", GLU),  # its activation has weights
    "llama4": (  # its experts give tokens without their sequences
        "Llama4TextConfig",
        GLU | {"intermediate_size_mlp": 64, "head_dim": 8, "num_local_experts": 4, "attention_chunk_size": 16},
    ),
    "phi3": ("Phi3Config", GLU | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """``plan``: fields of Plan, but for those of ``layout``. ``lengths``: of sequences, mixed or equal. ``fails``: a rank that
    has memory for so many tokens at once from some step and micro-batch on, forward, backward or in passes without gradients.
    ``rated``: answers are learned by KTO."""

    model: str = "llama"
    world: int = 1
    layout: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # fields of Arguments
    lengths: str = "mixed"
    micro_batch: int = 2
    overlapped: bool = False  # gradients are summed in the backward pass, as on devices
    adapter: bool = False  # LoRA, trained on a bf16 base
    steps: int = STEPS
    layers: int = 2
    device: str = "cpu"
    fails: dict[str, Any] | None = None  # rank, step, tokens; micro_batch: 0; where: forward
    rated: bool = False
    skips: tuple[int, ...] = ()  # steps in which no rank runs the MLP of the last layer

    @property
    def alone(self) -> Case:
        """The same job of one process."""
        return replace(self, world=1, layout={}, fails=None, overlapped=False)


@dataclass(frozen=True)
class Result:
    losses: list[float]
    norms: list[float]
    evaluation: float
    held: float = 0.0  # of the model's elements, what rank 0 has of weights
    state: float = 0.0  # and of the optimizer's first moments
    halvings: int = 0
    halvings_without_gradients: int = 0
    pinned: int = 0  # the most bytes of pinned memory that rank 0 had at once, with activations on the host

    def difference(self, other: Result) -> float:
        """The largest, of losses."""
        pairs = zip([*self.losses, self.evaluation], [*other.losses, other.evaluation], strict=True)
        return max(abs(one - two) for one, two in pairs)

    def norm_difference(self, other: Result) -> float:
        """The largest, relative, of gradient norms."""
        return max(abs(one - two) / two for one, two in zip(self.norms, other.norms, strict=True))


class Results(Mapping[str, Result]):
    """The result of each case. Reading that of a case that failed raises an error with the words of its ranks."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._outcomes: dict[str, dict[str, Any]] = {}
        for line in lines:
            outcome = json.loads(line)
            self._outcomes[outcome["name"]] = outcome

    def __getitem__(self, name: str) -> Result:
        outcome = self._outcomes[name]
        assert "error" not in outcome, f"{name}: {outcome['error']}"
        return Result(**outcome["result"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._outcomes)

    def __len__(self) -> int:
        return len(self._outcomes)


def run(cases: dict[str, Case], folder: Path, run_script: RunScript) -> Results:
    """Return the result of each case's rank 0. ``run_script``: runs this file, with two arguments, as a program."""
    given, output = folder / "cases.json", folder / "results.jsonl"
    given.write_text(json.dumps({name: asdict(case) for name, case in cases.items()}))
    ended = run_script(__file__, str(given), str(output))
    assert ended.returncode == 0, ended.stderr[-LAST_WORDS:]
    return Results(output.read_text().splitlines())


def with_references(cases: dict[str, Case]) -> dict[str, Case]:
    """And the job of one process that each is held against, by ``reference_name``."""
    return {reference_name(case): case.alone for case in cases.values()} | cases


def reference_name(case: Case) -> str:
    return "alone: " + json.dumps(asdict(case.alone), sort_keys=True)


def assert_as_one_process(name: str, case: Case, results: Mapping[str, Result], *, loss: float | None = None) -> None:
    """``loss``: the difference allowed, where it is not the precision's own."""
    ours, theirs = results[name], results[reference_name(case)]
    print(f"{name}: loss {ours.difference(theirs):.1e}, norm {ours.norm_difference(theirs):.1e}, holds {ours.held:.3f}")
    precision = case.plan.get("precision", "fp32")
    assert ours.difference(theirs) < (loss or (1e-5 if precision == "fp32" else 1e-3))
    assert ours.norm_difference(theirs) < (1e-4 if precision == "fp32" else 2e-2)


def a_config(model: str, layers: int = 4) -> Any:
    """T5 has two layers in each of its stacks."""
    import transformers

    name, options = CONFIGS[model]
    return getattr(transformers, name)(**(options | {key: layers for key in LAYERS if key in options}))


def a_plan(case: Case) -> Any:
    from upshift.planning.layout import Layout
    from upshift.planning.plan import Plan

    fields = {"device": case.device, "host": "test", "model": "test", "sequence_length": LENGTH, "optim": "adamw_torch"}
    fields |= {"num_processes": case.world, "layout": Layout(**case.layout), "per_device_train_batch_size": case.micro_batch}
    plan = Plan(**(fields | case.plan))
    return plan.changed(gradient_accumulation_steps=GLOBAL_BATCH // case.micro_batch // plan.data_parallel)


def in_two_micro_batches(case: Case) -> Case:
    return replace(case, micro_batch=GLOBAL_BATCH // 2 // a_plan(case).data_parallel)


def some_sequences(count: int, lengths: str, *, seed: int = 0) -> Any:
    import numpy as np

    from upshift.training.data.tokens import TokenizedCorpus, cut_sequences

    generator = np.random.default_rng(seed)
    sizes = generator.integers(4, LENGTH + 1, count) if lengths == "mixed" else np.full(count, LENGTH)
    documents = [generator.integers(3, VOCABULARY, int(size)).astype(np.int32) for size in sizes]
    return cut_sequences(TokenizedCorpus.from_documents(documents), LENGTH)


def rated(sequences: Any, case: Case) -> Any:
    """The same sequences, of which every second one is a mismatched answer, if answers are rated."""
    import numpy as np

    if not case.rated:
        return sequences
    ratings = np.repeat(np.arange(len(sequences) // 2) % 3 > 0, 2)
    reference = -4.6 * sequences.lengths.astype(np.float32)  # near that of random weights, so that the KL term is above 0
    return replace(sequences, ratings=ratings, reference=reference)


def train(case: Case) -> Result:
    """As the training loop does it; on every rank."""
    import torch

    from upshift.models.build import build_model, choose_class
    from upshift.training import prepare
    from upshift.training import step as step_module
    from upshift.training.arguments import Arguments
    from upshift.training.batches.layout import layout_for
    from upshift.training.batches.objective import Objective
    from upshift.training.batches.sampler import BatchSource, evaluation_batches
    from upshift.training.distributed.gradients import can_overlap
    from upshift.training.distributed.mesh import init_mesh
    from upshift.training.evaluate import evaluate
    from upshift.training.prepare import configure_process, prepare_model
    from upshift.training.step import TrainStep

    plan = a_plan(case)
    if case.device == "cuda":
        configure_process(plan)
    if plan.activation_offload:
        prepare.MIN_OFFLOADED_BYTES = 1  # else those of a tiny model stay
    place = init_mesh(plan)
    config = a_config(case.model, case.layers)
    model_class, kind = choose_class(config, case.model)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if plan.precision == "bf16-weights" else torch.float32
    built = build_model(config, model_class, dtype=dtype)
    if case.adapter:
        built = adapted(built)
    elements = sum(parameter.numel() for parameter in built.parameters())
    model = prepare_model(built, plan, place)
    if case.overlapped:
        step_module.can_overlap = lambda plan: True
    stepper = TrainStep(model, place, Arguments(**(OPTIONS | case.options)))
    step_module.can_overlap = can_overlap
    objective = Objective(
        kind=kind, vocab_size=VOCABULARY, mask_token_id=1 if kind == "masked-lm" else None, has_pairs=case.rated,
        has_ratings=case.rated,
    )  # fmt: skip
    layout = layout_for(plan, objective, data_rank=place.data_rank)
    source = BatchSource(
        sequences=rated(some_sequences(SEQUENCES, case.lengths), case), global_batch=GLOBAL_BATCH, layout=layout,
        objective=objective, seed=1,
    )
    batches = source.batches()
    outcomes = []
    for step in range(case.steps):
        if case.fails is not None and (place.rank, step) == (case.fails["rank"], case.fails["step"]):
            run_out_of_memory(model, **{name: value for name, value in case.fails.items() if name not in ("rank", "step")})
        has_last_layer = place.stage == plan.layout.pipeline_parallel - 1
        with without_mlp(model) if step in case.skips and has_last_layer else contextlib.nullcontext():
            outcomes.append(stepper.step(next(batches)))
    seven = rated(some_sequences(8 if case.rated else 7, "mixed", seed=9), case)
    held_out = evaluation_batches(seven, global_batch=GLOBAL_BATCH, layout=layout, objective=objective)
    return Result(
        losses=[outcome.loss for outcome in outcomes],
        norms=[outcome.gradient_norm or 0.0 for outcome in outcomes],
        evaluation=evaluate(stepper.passes, held_out, stepper.preference),
        held=sum(elements_of(parameter) for parameter in model.parameters()) / elements,
        state=sum(elements_of(state["exp_avg"]) for state in stepper.optimizer.state.values() if "exp_avg" in state) / elements,
        halvings=stepper.halvings,
        halvings_without_gradients=stepper.passes.halvings,
        pinned=most_pinned_bytes() if plan.activation_offload else 0,
    )


@contextlib.contextmanager
def without_mlp(model: Any) -> Iterator[None]:
    """The last layer's MLP adds nothing while open, and none of its weights is used."""
    import torch

    from upshift.models.build import find_stacks

    mlp = find_stacks(model)[-1][1][-1].mlp
    mlp.forward = torch.zeros_like
    try:
        yield
    finally:
        del mlp.forward


def most_pinned_bytes() -> int:
    """Of the pretended GPU, which alone is offered activations on the host here."""
    import pretended_cuda

    return int(pretended_cuda.pinned_bytes_and_peak()[1])


def adapted(model: Any) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    whole = get_peft_model(model.to(torch.bfloat16), lora)
    for parameter in whole.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return whole


def elements_of(tensor: Any) -> int:
    from torch.distributed.tensor import DTensor

    return int((tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel())


def run_out_of_memory(model: Any, *, tokens: int, micro_batch: int = 0, where: str = "forward") -> None:
    """In the last layer."""
    import torch

    from upshift.models.build import find_stacks

    passes = [0]

    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("made up by the test")

    def look(module: Any, given: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad == (where == "no gradients"):
            return
        passes[0] += 1
        if hidden.shape[:2].numel() > tokens and passes[0] > micro_batch:
            if where != "backward":
                refuse()
            hidden.register_hook(refuse)

    find_stacks(model)[-1][1][-1].register_forward_hook(look)


def run_world(given: tuple[dict[str, Case], Path]) -> None:
    cases, output = given
    for name, case in cases.items():
        result = train(case)
        if rank_of_this() == 0:
            add_line(output, {"name": name, "result": asdict(result)})


def rank_of_this() -> int:
    from upshift.training.rank_processes import rank_environment

    return rank_environment()[0]


def add_line(output: Path, outcome: dict[str, Any]) -> None:
    with output.open("a") as lines:
        lines.write(json.dumps(outcome) + "\n")


def run_cases(cases: dict[str, Case], output: Path) -> None:
    """Add a line for each case, all of one number of ranks, to the output."""
    left = dict(cases)
    while left:
        child = fork_world(left, output)
        words = wait_for_world(child, output)
        done = {json.loads(line)["name"] for line in output.read_text().splitlines()}
        left = {name: case for name, case in left.items() if name not in done}
        if left:
            name = next(iter(left))
            errors = words_of_ranks(output).read_text(errors="replace")[-LAST_WORDS:]
            add_line(output, {"name": name, "error": f"{words or 'there is no result'}\n{errors}"})
            left.pop(name)


def wait_for_world(child: int, output: Path) -> str:
    """Return how the world failed, or nothing. Kill it if no case ends for ``CASE_SECONDS``."""
    size, since = 0, time.monotonic()
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return f"the ranks ended with exit code {code}" if code else ""
        if output.stat().st_size > size:
            size, since = output.stat().st_size, time.monotonic()
        if time.monotonic() - since > CASE_SECONDS:
            os.kill(child, signal.SIGKILL)  # its ranks end with it
            os.waitpid(child, 0)
            return f"the ranks did not end within {CASE_SECONDS:.0f} s"
        time.sleep(POLL_SECONDS)


def words_of_ranks(output: Path) -> Path:
    return output.with_suffix(".stderr")


def fork_world(cases: dict[str, Case], output: Path) -> int:
    """Return the id of a process that joins the ranks: one that has computed cannot fork ranks any more."""
    from upshift.parent_process import end_with
    from upshift.training.rank_processes import join_processes

    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        end_with(parent)
        sys.stderr = words_of_ranks(output).open("w", buffering=1)
        os.dup2(sys.stderr.fileno(), 2)
        join_processes(a_plan(next(iter(cases.values()))), run_world, (cases, output))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def import_all() -> None:
    """Before the forks: every rank then has it."""
    import importlib

    import torch
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor

    import upshift.training.prepare
    import upshift.training.step  # noqa: F401

    for model in CONFIGS:
        importlib.import_module(type(a_config(model)).__module__.replace("configuration_", "modeling_"))
    torch.set_num_threads(1)


def main(given: Path, output: Path) -> None:
    import_all()
    output.touch()
    worlds: dict[int, dict[str, Case]] = {}
    for name, described in json.loads(given.read_text()).items():
        case = Case(**described)
        worlds.setdefault(case.world, {})[name] = case
    for size in sorted(worlds):
        run_cases(worlds[size], output)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
