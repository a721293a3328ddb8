"""vLLM generates in an environment of its own: the messages by a pretended engine, its tokens by a real one if there is one."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from chat_models import byte_level_tokenizer
from command import Command
from hypothesis import given
from hypothesis import strategies as st
from pretended_vllm import make_interpreter
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import upshift
from upshift.cli.plan.inference import command_words, vllm_options
from upshift.errors import JobFailed, RequestError
from upshift.inference.engine_environment import EngineArguments, arguments_of_plan
from upshift.inference.generation.engines.text_engine import Progress, TextRequest
from upshift.inference.generation.text_batches import follow_texts, time_texts
from upshift.launching.vllm_server import VllmJob, leader_worker_set
from upshift.planning.inference.plan import InferencePlan
from upshift.planning.programs.write import write_document

REAL = os.environ.get("UPSHIFT_VLLM_PYTHON")  # tests/conftest.py hides it from races
NEEDS_REAL = pytest.mark.skipif(not REAL, reason="UPSHIFT_VLLM_PYTHON names no environment that has vLLM")
SIZES: dict[str, Any] = {
    "vocab_size": 360, "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1,
}  # fmt: skip
PROMPTS = ["the model writes", "a", "north and north", "roads to every question"]
NEW = 12


def save(folder: Path, *, layers: int, is_table: bool = False, positions: int = SIZES["max_position_embeddings"]) -> str:
    """Save a model. With ``is_table`` its layers add nothing, so that its logits depend on the last token alone."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "max_position_embeddings": positions}, num_hidden_layers=layers))
    for layer in model.model.layers if is_table else ():
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    model.save_pretrained(folder)
    byte_level_tokenizer(None).save_pretrained(folder)
    return str(folder)


def by_transformers(model: str, prompts: Sequence[str], **options: Any) -> list[list[int]]:
    reference = AutoModelForCausalLM.from_pretrained(model).eval()
    answers = []
    for prompt in byte_level_tokenizer(None)(list(prompts)).input_ids:
        output = reference.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options)
        answers.append(output[0, len(prompt) :].tolist())
    return answers


class Pretended:
    """A model, and the folder of a pretended engine that knows it."""

    def __init__(self, model: str, folder: Path) -> None:
        self.model = model
        self.folder = folder
        loaded = AutoModelForCausalLM.from_pretrained(model).eval()
        with torch.no_grad():
            self.table = loaded(torch.arange(SIZES["vocab_size"])[:, None]).logits[:, 0].tolist()
        self.python = make_interpreter(folder, self.table)

    def generator(self, **options: Any) -> upshift.Generator:
        return upshift.Generator(self.model, engine="vllm", engine_python=self.python, **options)

    @property
    def start(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "start.json").read_text()))


@pytest.fixture(scope="module")
def pretended(tmp_path_factory: pytest.TempPathFactory) -> Pretended:
    model = save(tmp_path_factory.mktemp("model"), layers=1, is_table=True)
    return Pretended(model, tmp_path_factory.mktemp("environment"))


@pytest.fixture
def mode(pretended: Pretended) -> Iterator[Path]:
    """The file that says how the pretended engine misbehaves, in this test alone."""
    yield pretended.folder / "mode"
    (pretended.folder / "mode").write_text("")


def test_its_texts_are_transformers_own_and_the_setup_is_its_arguments(pretended: Pretended) -> None:
    generator = pretended.generator()
    expected = by_transformers(pretended.model, PROMPTS)
    assert [answer.tokens for answer in generator.generate(PROMPTS, max_new_tokens=NEW)] == expected
    assert generator.race is not None and generator.race.chosen.label() == "vllm fp32"
    (run,) = (run for run in generator.race.runs if run.setup.engine == "vllm")
    assert run.same_tokens == 1.0 and run.largest_difference is not None and run.largest_difference < 1e-5
    assert run.load_seconds and run.seconds_for(1.0) > run.load_seconds
    assert pretended.start["model"] == pretended.model and pretended.start["dtype"] == "float32"
    assert pretended.start["max_num_seqs"] == len(PROMPTS)
    # The next call takes the same process: sampling is the user's, texts end at stop strings, and a stream may be left.
    text = byte_level_tokenizer(None).decode(expected[0])
    (answer,) = generator.generate(PROMPTS[:1], max_new_tokens=NEW, stop_strings=text[3])
    assert answer.ending == "stop" and text[3] in answer.text and answer.tokens == expected[0][: len(answer.tokens)]
    stream = generator.stream(PROMPTS[0], max_new_tokens=NEW)
    next(stream)
    stream.close()
    generator.generate(PROMPTS[:2], max_new_tokens=3, do_sample=True, temperature=0.5, top_k=7, min_p=0.1, seed=3)
    added = [json.loads(line) for line in (pretended.folder / "messages.jsonl").read_text().splitlines()]
    first, second = (request["sampling"] for request in added[-1]["add"])
    assert first["temperature"] == 0.5 and first["top_k"] == 7 and first["min_p"] == 0.1 and first["max_tokens"] == 3
    assert first["seed"] != second["seed"] and first["stop_token_ids"] == [2]


def test_what_the_user_fixes_replaces_what_the_setup_says(pretended: Pretended, upshift: Command, tmp_path: Path) -> None:
    fixed = {"max_num_seqs": 3, "kv_cache_dtype": "fp8", "enable_prefix_caching": False, "gpu_memory_utilization": 0.5}
    options = [word for name, value in fixed.items() for word in ("--engine-set", f"{name}={json.dumps(value).strip(chr(34))}")]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    output = tmp_path / "answers.jsonl"
    answer = upshift(
        "generate", pretended.model, "--prompts", prompts, "--output", output, "--max-new-tokens", NEW, "--engine", "vllm",
        "--engine-python", pretended.python, *options,
    )  # fmt: skip
    assert answer.code == 0, answer.err
    assert pretended.start.items() >= fixed.items()
    assert len(output.read_text().splitlines()) == len(PROMPTS) and "Chosen: vllm fp32" in answer.out


@pytest.mark.parametrize(
    ("says", "text"),
    [
        ("older", r"has vllm 0.0.1, which lacks .*\(EngineArgs.structured_outputs_config\); give .* vllm 0.32.0"),
        ("newer", r"has vllm 0.0.1, which lacks .*\(SamplingParams.flat_logprobs\); give"),
        ("no prefix cache", "--engine-set enable_prefix_caching is not an argument of vllm 0.0.1"),
    ],
)
def test_a_version_with_other_names_is_one_line_before_it_starts(
    pretended: Pretended, upshift: Command, mode: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, text: str
) -> None:
    (pretended.folder / "start.json").unlink(missing_ok=True)
    mode.write_text(says)
    ask = ("generate", pretended.model, "--prompt", "a", "--max-new-tokens", 2, "--engine-python", pretended.python)
    answer = upshift(*ask, "--engine-set", "enable_prefix_caching=false")
    assert answer.code == 2 and re.search(text, answer.err) and len(answer.err.strip().splitlines()) == 1, answer.err
    assert not (pretended.folder / "start.json").exists()
    monkeypatch.setenv("UPSHIFT_VLLM_PYTHON", str(pretended.python))
    found = json.loads(upshift("doctor", "--quick", "--json", "--output", tmp_path).out)["findings"]
    (finding,) = (one for one in found if one["subject"] == "vllm")
    assert (finding["severity"] == "error") == (says != "no prefix cache")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tensor_parallel_size": 3}, "does not divide the 4 heads"),
        ({"pipeline_parallel_size": 2}, "more than the 1 layers"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"max_model_len": 65}, "more than the 64 positions"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"dtype": "int3"}, "dtype"),
        ({"speculative_config": "ngram"}, "is no JSON object"),
        ({"speculative_config": {"model": "no-such-draft", "num_speculative_tokens": 2}}, "no-such-draft"),
        ({"block_sizes": 3}, "use one of dtype, tensor_parallel_size"),
    ],
)
def test_arguments_that_are_not_possible_are_refused_before_anything_starts(
    pretended: Pretended, arguments: dict[str, Any], text: str
) -> None:
    (pretended.folder / "start.json").unlink(missing_ok=True)
    with pytest.raises(RequestError, match=text):
        pretended.generator(engine_arguments=arguments)
    assert not (pretended.folder / "start.json").exists()


def test_environments_that_have_no_vllm_are_one_line(
    pretended: Pretended, upshift: Command, mode: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ("generate", pretended.model, "--prompt", "a", "--max-new-tokens", 2)
    mode.write_text("no vllm")
    no_python = tmp_path / "text"
    no_python.write_text("no program")
    wrong = {
        "has no vLLM": ("--engine-python", pretended.python), "does not exist": ("--engine-python", tmp_path / "no"),
        "is a folder": ("--engine-python", tmp_path), "does not run as a Python": ("--engine-python", no_python),
        "give --engine-python PATH": ("--engine", "vllm"), "no environment that has it": ("--engine-set", "max_num_seqs=2"),
        "has no value": ("--engine-set", "max_num_seqs"),
        "is for --engine vllm": ("--engine", "torch", "--engine-python", pretended.python),
    }  # fmt: skip
    for text, options in wrong.items():
        answer = upshift(*ask, *options)
        assert answer.code == 2 and text in answer.err and len(answer.err.strip().splitlines()) == 1, answer.err
    monkeypatch.setenv("UPSHIFT_VLLM_PYTHON", str(tmp_path / "no"))
    answer = upshift(*ask)
    assert answer.code == 2 and "the environment variable UPSHIFT_VLLM_PYTHON" in answer.err


def test_the_doctor_says_what_the_environment_has(
    pretended: Pretended, upshift: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPSHIFT_VLLM_PYTHON", str(pretended.python))
    found = json.loads(upshift("doctor", "--quick", "--json", "--output", tmp_path).out)["findings"]
    (finding,) = (one for one in found if one["subject"] == "vllm")
    assert finding["severity"] == "ok" and "vllm 0.0.1, torch 2.0.0" in finding["what"] and "tests run 0.32.0" in finding["what"]
    monkeypatch.setenv("UPSHIFT_VLLM_PYTHON", str(tmp_path / "no"))
    answer = upshift("doctor", "--quick", "--output", tmp_path)
    assert answer.code == 1 and "does not exist" in answer.out


def test_replicas_are_engines_of_their_own_and_share_the_requests(pretended: Pretended) -> None:
    """Both have the whole arguments but the number of replicas, and half of the sequences. A draft model is vLLM's own to run."""
    generator = pretended.generator(engine_arguments={"data_parallel_size": 2, "max_model_len": 60}, draft=pretended.model)
    answers = generator.generate(PROMPTS, max_new_tokens=NEW)
    assert [answer.tokens for answer in answers] == by_transformers(pretended.model, PROMPTS)
    assert generator.text_engine is not None and len(set(generator.text_engine.pids)) == 2
    assert "data_parallel_size" not in pretended.start and pretended.start["max_num_seqs"] == len(PROMPTS) / 2
    assert pretended.start["speculative_config"]["model"] == pretended.model
    os.kill(generator.text_engine.pids[1], signal.SIGKILL)
    with pytest.raises(JobFailed, match="ended with signal 9"):
        generator.generate(PROMPTS, max_new_tokens=NEW)
    with pytest.raises(ProcessLookupError):  # the other replica ends with it
        os.killpg(generator.text_engine.pids[0], 0)
    with pytest.raises(RequestError, match="two ways to guess"):
        pretended.generator(engine_arguments={"speculative_config": {"method": "ngram"}}, draft=pretended.model)


def test_options_that_vllm_lacks_leave_it_out_of_a_race(pretended: Pretended) -> None:
    with pytest.raises(RequestError, match="vllm has no no_repeat_ngram_size"):
        pretended.generator().generate(PROMPTS, max_new_tokens=NEW, no_repeat_ngram_size=2)
    generator = upshift.Generator(pretended.model, engine_python=pretended.python)
    answers = generator.generate(PROMPTS, max_new_tokens=NEW, no_repeat_ngram_size=2)
    assert [answer.tokens for answer in answers] == by_transformers(pretended.model, PROMPTS, no_repeat_ngram_size=2)
    assert generator.race is not None and not any(run.setup.engine == "vllm" for run in generator.race.runs)


def test_a_killed_engine_a_long_prompt_and_an_unknown_model_are_one_line(
    pretended: Pretended, upshift: Command, mode: Path, tmp_path: Path
) -> None:
    generator = pretended.generator(engine_arguments={"max_model_len": 24})
    generator.generate(PROMPTS, max_new_tokens=NEW)
    with pytest.raises(RequestError, match=r"prompt 1 has 18 tokens, with an answer of 9 more than the 24 positions"):
        generator.generate(["north roads trees rivers x y z u v w"], max_new_tokens=9)
    pretended.generator().generate(PROMPTS, max_new_tokens=NEW)
    mode.write_text("killed")
    killed = pretended.generator()
    with pytest.raises(JobFailed, match=r"ended with signal 9 \(SIGKILL\): the pretended engine is killed") as failed:
        killed.generate(PROMPTS, max_new_tokens=NEW)  # its race is recalled
    assert "\n" not in str(failed.value)
    mode.write_text("unknown model")
    other = tmp_path / "python"  # not the interpreter of the races before
    other.symlink_to(pretended.python)
    answer = upshift(
        "generate", pretended.model, "--prompt", "a", "--max-new-tokens", NEW, "--engine", "vllm", "--engine-python", other
    )
    (line,) = (line for line in answer.err.splitlines() if line.startswith("upshift:"))
    assert answer.code == 2 and "Model architectures ['Odd'] are not supported" in line and "Traceback" not in answer.err


class TableEngine:
    """An engine in this process whose next logits depend on the last token alone."""

    weight_bytes = 0
    positions = 100
    cache_tokens = None
    pids: Sequence[int] = ()

    def __init__(self, table: np.ndarray) -> None:
        self.table = table
        self.begun = 0
        self.live: dict[int, tuple[int, int]] = {}  # the last token, and the tokens that are still to come

    def check(self, prompt_tokens: int, new_tokens: int, name: str) -> None: ...

    def sampling(self, sequence: Any) -> dict[str, Any]:
        raise NotImplementedError

    def greedy(self, new_tokens: int) -> dict[str, Any]:
        return {"count": new_tokens}

    def add(self, requests: Any) -> list[int]:
        numbers = []
        request: TextRequest
        for request in requests:
            self.begun += 1
            self.live[self.begun] = (request.prompt[-1], request.sampling["count"])
            numbers.append(self.begun)
        return numbers

    def step(self) -> list[Progress]:
        steps = []
        for number, (last, left) in list(self.live.items()):
            token = int(self.table[last].argmax())
            steps.append(Progress(number, [token], self.table[last][None], has_ended=left == 1))
            self.live[number] = (token, left - 1)
            if left == 1:
                del self.live[number]
        return steps

    def abort(self, requests: Any) -> None: ...

    def wait(self) -> None: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


@given(seed=st.integers(0, 1000), followed=st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_an_engine_that_chooses_by_itself_follows_any_tokens(seed: int, followed: list[int]) -> None:
    """Its logits are those after the tokens to follow, not those after its own."""
    table = np.random.default_rng(seed).normal(size=(5, 5)).astype(np.float32)
    tokens = np.array([followed, followed[::-1]]).T
    prompts = [[1, 3], [2]]
    logits = follow_texts(TableEngine(table), prompts, tokens)
    before = np.concatenate([[[3, 2]], tokens[:-1]])
    np.testing.assert_array_equal(logits, table[before])
    assert len(time_texts(TableEngine(table), prompts, len(tokens))) == len(tokens)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, upshift.Generator]]:
    """A model, and a generator with the real engine. It starts twice, which takes a minute."""
    model = save(tmp_path_factory.mktemp("real"), layers=2)
    yield model, upshift.Generator(model, engine="vllm", engine_python=REAL)


@NEEDS_REAL
def test_vllm_writes_what_transformers_writes(real: tuple[str, upshift.Generator]) -> None:
    model, generator = real
    expected = by_transformers(model, PROMPTS)
    assert [answer.tokens for answer in generator.generate(PROMPTS, max_new_tokens=NEW)] == expected
    end = expected[0][5]
    ended = [row[: row.index(end) + 1] if end in row else row for row in expected]
    assert [answer.tokens for answer in generator.generate(PROMPTS, max_new_tokens=NEW, eos_token_id=[end])] == ended
    penalized = by_transformers(model, PROMPTS, repetition_penalty=1.5)
    assert [answer.tokens for answer in generator.generate(PROMPTS, max_new_tokens=NEW, repetition_penalty=1.5)] == penalized
    sampled = [generator.generate(PROMPTS, max_new_tokens=NEW, do_sample=True, seed=seed) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    shared = ["north roads trees rivers " + prompt for prompt in PROMPTS]  # a beginning that vLLM computes once
    assert [answer.tokens for answer in generator.generate(shared, max_new_tokens=NEW)] == by_transformers(model, shared)
    stream = generator.stream(PROMPTS[0], max_new_tokens=40)
    next(stream)
    stream.close()  # its request is aborted
    assert generator.generate(PROMPTS, max_new_tokens=NEW)[2].tokens == expected[2]


@NEEDS_REAL
def test_a_killed_vllm_is_one_line_and_leaves_no_process(real: tuple[str, upshift.Generator]) -> None:
    _, generator = real
    generator.generate(PROMPTS, max_new_tokens=NEW)
    assert generator.text_engine is not None
    os.kill(generator.text_engine.pids[0], signal.SIGKILL)
    with pytest.raises(JobFailed, match=r"the engine vllm ended with signal 9") as failed:
        generator.generate(PROMPTS, max_new_tokens=NEW)
    assert "\n" not in str(failed.value)
    with pytest.raises(ProcessLookupError):
        os.killpg(generator.text_engine.pids[0], 0)


@NEEDS_REAL
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_two_ranks_share_the_heads(real: tuple[str, upshift.Generator]) -> None:
    model, _ = real
    halves = upshift.Generator(model, engine="vllm", engine_python=REAL, engine_arguments={"tensor_parallel_size": 2})
    answers = halves.generate(PROMPTS, max_new_tokens=NEW)
    assert [answer.tokens for answer in answers] == by_transformers(model, PROMPTS)


@NEEDS_REAL
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two replicas need two cores")
def test_two_replicas_share_the_prompts(real: tuple[str, upshift.Generator]) -> None:
    model, _ = real
    replicas = upshift.Generator(model, engine="vllm", engine_python=REAL, engine_arguments={"data_parallel_size": 2})
    answers = replicas.generate(PROMPTS, max_new_tokens=NEW)
    assert [answer.tokens for answer in answers] == by_transformers(model, PROMPTS)
    assert replicas.text_engine is not None and len(replicas.text_engine.pids) == 2


@NEEDS_REAL
def test_a_draft_model_changes_no_text(real: tuple[str, upshift.Generator]) -> None:
    model, _ = real
    drafted = upshift.Generator(model, engine="vllm", engine_python=REAL, draft=model)
    assert [answer.tokens for answer in drafted.generate(PROMPTS, max_new_tokens=NEW)] == by_transformers(model, PROMPTS)


@NEEDS_REAL
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two stages need two cores")
def test_two_stages_are_refused_by_vllm_in_one_line(real: tuple[str, upshift.Generator]) -> None:
    """vLLM 0.32.0 has no pipelines on CPUs. docs/many_hosts.md says so; a version that has them fails here."""
    model, _ = real
    stages = upshift.Generator(model, engine="vllm", engine_python=REAL, engine_arguments={"pipeline_parallel_size": 2})
    with pytest.raises(RequestError, match="does not run in --engine vllm here .*KeyError") as refused:
        stages.generate(PROMPTS, max_new_tokens=NEW)
    assert "\n" not in str(refused.value)


PARSE = """
import json, sys
from vllm.entrypoints.cli import serve
parser = serve.FlexibleArgumentParser()
command = serve.ServeSubcommand()
command.subparser_init(parser.add_subparsers())
for words in json.loads(sys.argv[1]):
    found = parser.parse_args(words)
    command.validate(found)
    print(json.dumps({name: value for name, value in vars(found).items() if isinstance(value, bool | int | float | str)}))
"""


@NEEDS_REAL
def test_vllms_own_parser_reads_all_that_is_written_for_its_server(tmp_path: Path) -> None:
    """The commands and files of plans, and the commands of a LeaderWorkerSet, with every argument that can be fixed."""
    fixed = {
        "dtype": "bfloat16", "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "enable_expert_parallel": True,
        "quantization": "fp8", "kv_cache_dtype": "fp8", "max_num_seqs": 3, "max_num_batched_tokens": 512, "max_model_len": 64,
        "gpu_memory_utilization": 0.5, "enable_prefix_caching": False, "enforce_eager": True,
        "speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}',
    }  # fmt: skip
    assert {*fixed, "data_parallel_size"} == {*EngineArguments.model_fields}
    job = VllmJob(
        model="m", served_name="n", port=8001, arguments=tuple(fixed.items()), ranks=4, nodes=4, gpus=2, cpus=1, memory="1Gi",
        image="i",
    )  # fmt: skip
    pods = list(yaml.safe_load_all(leader_worker_set(job)))[0]["spec"]["leaderWorkerTemplate"]
    commands = [pods[name]["spec"]["containers"][0]["command"][-1] for name in ("leaderTemplate", "workerTemplate")]
    lines = [shlex.split(command.removeprefix("exec vllm ").replace('"$LWS_WORKER_INDEX"', "1")) for command in commands]
    expected: list[dict[str, Any]] = [{**fixed, "nnodes": 2, "headless": is_headless} for is_headless in (False, True)]
    one: dict[str, Any] = {"device": "cuda", "host": "", "model": "", "max_concurrency": 8, "prefill_chunk_tokens": 64}
    plans = [
        InferencePlan(**one, weights="fp8", kv_cache="fp8", tensor_parallel=2, execution="graphs"),
        InferencePlan(**one, weights="fp32", kv_cache="fp32", pipeline_parallel=2, replicas=2, execution="eager"),
        InferencePlan(**one, weights="fp16", kv_cache="fp16", execution="eager"),
    ]
    for number, plan in enumerate(plans):
        write_document(tmp_path / f"{number}.yaml", vllm_options(plan, longest=48, is_stored=False))
        arguments = {**(arguments_of_plan(plan) or {}), "max_model_len": 48}
        lines += [["serve", "m", "--config", str(tmp_path / f"{number}.yaml")], ["serve", "m", *command_words(arguments)]]
        expected += [arguments, arguments]
    assert REAL is not None
    done = subprocess.run([REAL, "-c", PARSE, json.dumps(lines)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    parsed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for found, wanted in zip(parsed, expected, strict=True):
        kept = {name: found.get(name) for name in wanted if name != "speculative_config"}
        assert kept == {name: value for name, value in wanted.items() if name != "speculative_config"}
