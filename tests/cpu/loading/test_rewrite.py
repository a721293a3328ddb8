"""``upshift shard``, ``merge`` and ``convert``: the tensors that they must write, and what stops them without harm."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from command import Answer
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from upshift.errors import JobFailed, RequestError
from upshift.loading.files.safetensors_header import read_header
from upshift.loading.files.safetensors_writer import copy_tensor, sort_tensors, write_file
from upshift.loading.output_lock import LOCK_NAME
from upshift.loading.rewrite.output_folder import MANIFEST, PARTIAL
from upshift.loading.rewrite.rewrite import shard

LLAMA = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
COMMAND = [sys.executable, "-m", "upshift.cli.main"]
PATIENCE_SECONDS = 120.0


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def one_line(answer: Answer, *words: str, code: int = 2) -> None:
    lines = [line for line in answer.err.splitlines() if line.startswith("upshift: ")]
    assert (answer.code, len(lines)) == (code, 1), answer.err
    assert "Traceback" not in answer.err
    for word in words:
        assert word in lines[0], lines[0]


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    """In six shards, with a file beside them."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder, max_shard_size="100KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "training_args.bin").write_bytes(b"a pickle")
    return folder


@pytest.fixture(scope="session")
def wide(tmp_path_factory) -> Path:
    """48 MB in one file, of which each tensor takes a megabyte."""
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    save_file({f"layer.{number}": torch.randn(512, 512) for number in range(48)}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "unknown"}')  # whose weights nobody can name, so none is missed
    return folder


def test_a_file_is_to_the_byte_what_the_library_writes(tmp_path):
    kinds = [
        torch.bool, torch.uint8, torch.int8, torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int16,
        torch.uint16, torch.float16, torch.bfloat16, torch.int32, torch.uint32, torch.float32, torch.complex64, torch.float64,
        torch.int64, torch.uint64, torch.float4_e2m1fn_x2,
    ]  # fmt: skip
    made = {f"{name}{dtype}": torch.arange(16, dtype=torch.uint8).view(dtype) for dtype in kinds for name in ("b", 'a é\n"')}
    made |= {"none": torch.zeros(0, 3), "one": torch.tensor(1.5)}
    save_file(made, tmp_path / "theirs.safetensors", {"format": "pt"})
    header = read_header(tmp_path / "theirs.safetensors")
    tensors = sort_tensors(copy_tensor(stored) for stored in reversed(header.tensors))
    write_file(tmp_path / "ours.safetensors", tensors, header.metadata, lambda count: None)
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


@pytest.mark.parametrize("size", [150_000, 60_000, 10**9])
def test_shards_are_those_of_save_pretrained(upshift, llama, tmp_path, size):
    """Files, their names, the index: as huggingface_hub splits the same tensors in the same order."""
    answer = upshift("shard", llama, "-o", tmp_path / "out", "--max-shard-size", size, "--json")
    assert answer.code == 0, answer.err
    written = json.loads(answer.out)
    stored = tensors_of(llama)
    files = sorted(llama.glob("*.safetensors"))
    in_file_order = {tensor.name: stored[tensor.name] for file in files for tensor in read_header(file).tensors}
    wanted = split_torch_state_dict_into_shards(in_file_order, max_shard_size=size)
    assert written["shards"] == len(wanted.filename_to_tensors) and written["bytes"] == wanted.metadata["total_size"]
    for name, inside in wanted.filename_to_tensors.items():
        save_file({tensor: stored[tensor] for tensor in inside}, tmp_path / "theirs", {"format": "pt"})
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "theirs").read_bytes()
    if wanted.is_sharded:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index == {"metadata": wanted.metadata, "weight_map": wanted.tensor_to_filename}
    assert (tmp_path / "out" / "config.json").read_bytes() == (llama / "config.json").read_bytes()
    assert (tmp_path / "out" / "tokenizer.json").is_file() and not (tmp_path / "out" / "training_args.bin").exists()
    loaded = [AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (tmp_path / "out", llama)]
    same(*loaded)


def test_the_digest_is_of_the_tensors_not_of_the_files(upshift, llama, tmp_path):
    digests = {
        json.loads(upshift("shard", llama, "-o", tmp_path / size, "--max-shard-size", size, "--json").out)["sha256"]
        for size in ("70KB", "1MB")
    }
    assert len(digests) == 1


def test_the_same_request_is_done_and_another_one_refused(upshift, llama, tmp_path):
    model, output = tmp_path / "model", tmp_path / "out"
    shutil.copytree(llama, model)
    request = ("shard", model, "-o", output, "--max-shard-size", "100KB")
    assert upshift(*request).code == 0
    before = {file.name: file.stat().st_mtime_ns for file in output.glob("*.safetensors")}
    again = upshift(*request, "--json")
    assert json.loads(again.out)["kept_shards"] == len(before)
    assert {file.name: file.stat().st_mtime_ns for file in output.glob("*.safetensors")} == before
    one_line(upshift("shard", model, "-o", output, "--max-shard-size", "90KB"), "another request")
    one_line(upshift("convert", model, "-o", output, "--dtype", "float16"), "another request", f"shard {model}")
    (damaged, *_) = sorted(output.glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert json.loads(upshift(*request, "--json").out)["kept_shards"] == len(before) - 1
    same(tensors_of(output), tensors_of(model))
    (first, *_) = sorted(model.glob("*.safetensors"))
    os.utime(first, (1, 1))
    one_line(upshift(*request), "its input has changed")


def test_killed_at_any_moment_it_goes_on(wide, tmp_path):
    """SIGKILL when the first, a middle and the last file have their names. No name is ever that of a part of a file."""
    output = tmp_path / "out"
    command = [*COMMAND, "shard", str(wide), "-o", str(output), "--max-shard-size", "2MB", "--json"]
    times: dict[str, int] = {}
    for wanted in (1, 20, 47):
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + PATIENCE_SECONDS
        while len(list(output.glob("*.safetensors"))) < wanted and time.monotonic() < end:
            assert running.poll() is None
            time.sleep(0.0005)
        running.send_signal(signal.SIGKILL)
        running.wait()
        whole = sorted(output.glob("*.safetensors"))
        for file in whole:
            read_header(file)
        assert not (output / "config.json").exists()
        recorded = json.loads((output / MANIFEST).read_text())["shards"]
        now = {file.name: file.stat().st_mtime_ns for file in whole}
        assert len(now.keys() - recorded.keys()) <= 1  # it has its name and is not written down yet
        assert now.items() >= times.items()
        times = {name: changed for name, changed in now.items() if name in recorded}
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout)["kept_shards"] == len(times) >= 46
    assert {file.name: file.stat().st_mtime_ns for file in output.glob("*.safetensors")}.items() >= times.items()
    same(tensors_of(output), tensors_of(wide))
    assert not list(output.glob(f"*{PARTIAL}"))


def test_killed_while_converting(wide, tmp_path):
    """In the middle of a file, by a child of this process, which has imported torch."""
    from upshift.loading.rewrite import convert

    def stop(done: int, total: int) -> None:
        if done > total // 3:
            os.kill(os.getpid(), signal.SIGKILL)

    output = tmp_path / "out"
    arguments = {"dtype": "bfloat16", "progress": stop}
    child = multiprocessing.get_context("fork").Process(target=convert.convert, args=(str(wide), output), kwargs=arguments)
    child.start()
    child.join(PATIENCE_SECONDS)
    assert child.exitcode == -signal.SIGKILL
    assert sorted(file.name for file in output.iterdir()) == [LOCK_NAME, f"model.safetensors{PARTIAL}", MANIFEST]
    convert.convert(str(wide), output, dtype="bfloat16", progress=lambda done, total: None)
    assert sorted(file.name for file in output.iterdir()) == ["config.json", "model.safetensors", MANIFEST]
    same(tensors_of(output), {name: tensor.bfloat16() for name, tensor in tensors_of(wide).items()})


def test_interrupted_it_says_what_is_safe(wide, tmp_path):
    output = tmp_path / "out"
    command = [*COMMAND, "shard", str(wide), "-o", str(output), "--max-shard-size", "2MB"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not list(output.glob("*.safetensors")):
        assert running.poll() is None
        time.sleep(0.0005)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=PATIENCE_SECONDS)
    one_line(Answer(running.returncode, "", err), "interrupted", "of 48 files", "the same command goes on", code=130)
    assert not list(output.glob(f"*{PARTIAL}"))


def test_two_at_once(wide, tmp_path):
    output = tmp_path / "out"
    refused = []

    def other(done: int, total: int) -> None:
        if len(refused) == 3:  # progress comes for every tensor, and each request begins anew
            return
        with pytest.raises(RequestError, match=rf"is being written by process {os.getpid()} on .*; wait until that ends"):
            shard(str(wide), output, max_shard_bytes=10**9, progress=lambda done, total: None)
        refused.append(done)

    shard(str(wide), output, max_shard_bytes=10**9, progress=other)
    assert len(refused) == 3


def test_a_write_that_fails(wide, tmp_path):
    """A limit on the size of files, which the system holds: the first shard is below it, the second is not."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (3000000, 3000000))"
    code = f"{limit}; from upshift.cli.main import main; main()"
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(wide / "config.json", model)
    save_file({"a": torch.zeros(250_000), "b": torch.zeros(250_000), "c": torch.zeros(10**6)}, model / "model.safetensors")
    output = tmp_path / "out"
    arguments = ["shard", str(model), "-o", str(output), "--max-shard-size", "1500KB"]
    ended = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    one_line(Answer(ended.returncode, "", ended.stderr), "File too large", "1 of 3 files", "the same command goes on", code=1)
    assert sorted(file.name for file in output.iterdir()) == ["model-00001-of-00003.safetensors", MANIFEST]
    subprocess.run([*COMMAND, *arguments], check=True, capture_output=True)
    same(tensors_of(output), tensors_of(model))


@pytest.fixture
def small_disk(tmp_path):
    """8 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk(upshift, wide, small_disk, tmp_path):
    one_line(upshift("shard", wide, "-o", small_disk / "out"), "needs 49.", "8.00 MiB free")
    save_file({f"layer.{number}": torch.randn(250_000) for number in range(5)}, tmp_path / "model.safetensors")
    shutil.copy(wide / "config.json", tmp_path)

    def fill(done: int, total: int) -> None:
        if done > 3 * 10**6:  # another program's file
            (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free))

    with pytest.raises(JobFailed, match=r"the disk is full; 1 of 5 files .* are whole, and the same command goes on"):
        shard(str(tmp_path), small_disk / "out", max_shard_bytes=10**6, progress=fill)
    assert not list((small_disk / "out").glob(f"*{PARTIAL}"))
    (small_disk / "other").unlink()
    done = shard(str(tmp_path), small_disk / "out", max_shard_bytes=10**6, progress=lambda done, total: None)
    assert done.kept_shards == 1
    same(tensors_of(small_disk / "out"), load_file(tmp_path / "model.safetensors"))


def test_memory_is_bounded_by_a_piece(tmp_path):
    """A tensor of 400 MB, through a process that imports no torch."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [10**8], "data_offsets": [0, 4 * 10**8]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * 10**8)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    code = (
        "import sys; from upshift.cli.main import app; app(standalone_mode=False); "
        "(peak,) = [line for line in open('/proc/self/status') if line.startswith('VmHWM')]; "
        "print(peak.split()[1], 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "shard", str(tmp_path), "-o", str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, imported = ended.stdout.splitlines()[-1].split()
    assert imported == "False"
    assert int(peak) < 150 * 1024, f"{int(peak) // 1024} MiB"


def test_what_was_read_again_is_compared(wide, tmp_path, monkeypatch):
    """A disk that gives back another byte."""
    from upshift.loading.rewrite import rewrite

    write = rewrite.write_file

    def written(path, tensors, metadata, told):
        hashes = write(path, tensors, metadata, told)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        return hashes

    monkeypatch.setattr(rewrite, "write_file", written)
    with pytest.raises(JobFailed, match="is not what was written"):
        shard(str(wide), tmp_path / "out", max_shard_bytes=10**9, progress=lambda done, total: None)
    assert [file.name for file in (tmp_path / "out").iterdir()] == [MANIFEST]


def test_refused(upshift, llama, tmp_path):
    one_line(upshift("shard", llama, "-o", llama), "is the input itself")
    one_line(upshift("shard", llama, "-o", tmp_path / "none" / "out"), "make it first")
    (tmp_path / "file").write_text("")
    one_line(upshift("shard", llama, "-o", tmp_path / "file"), "is a file")
    one_line(upshift("shard", llama, "-o", tmp_path), "is not empty (file)")
    (tmp_path / "bare").mkdir()
    shutil.copy(llama / "config.json", tmp_path / "bare")
    one_line(upshift("shard", tmp_path / "bare", "-o", tmp_path / "out"), "has no", "upshift train ... --from-config")
    one_line(upshift("shard", llama, "-o", tmp_path / "out", "--max-shard-size", "5 apples"), "5 apples")
    one_line(upshift("shard", llama, "-o", tmp_path / "out", "--max-shard-size", "0"), "--max-shard-size 0", "5GB")
    one_line(upshift("convert", llama, "-o", tmp_path / "out", "--dtype", "int8"), "int8", "bfloat16, float16, float32")
    one_line(upshift("merge", llama, "-o", tmp_path / "out"), "adapter_config.json")
    shutil.copytree(llama, tmp_path / "quantized")
    config = json.loads((llama / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "quantized" / "config.json").write_text(json.dumps(config))
    one_line(upshift("convert", tmp_path / "quantized", "-o", tmp_path / "out", "--dtype", "float16"), "quantized")
    assert not (tmp_path / "out").exists()


CONVERTED = {  # classes that keep something in fp32: strictly, from fp16 only, nothing; buffers and whole numbers are stored, too
    "t5": ("T5Config", "T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}),
    "moe": (
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
        LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    ),
    "batchnorm": (
        "ResNetConfig", "ResNetForImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8},
    ),
    "deepseek": (
        "DeepseekV3Config", "DeepseekV3ForCausalLM",
        LLAMA
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
        | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
        | {"n_group": 1, "topk_group": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CONVERTED)
def test_converted_is_what_transformers_has(upshift, tmp_path, name, dtype):
    """After it has loaded the checkpoint in that dtype, and saved it."""
    config, kind, sizes = CONVERTED[name]
    torch.manual_seed(0)
    made = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
    made.save_pretrained(tmp_path / "model", max_shard_size="50KB")
    answer = upshift("convert", tmp_path / "model", "-o", tmp_path / "out", "--dtype", dtype, "--json")
    assert answer.code == 0, answer.err
    theirs = getattr(transformers, kind).from_pretrained(tmp_path / "model", dtype=getattr(torch, dtype))
    theirs.save_pretrained(tmp_path / "theirs")
    same(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "theirs"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    again = getattr(transformers, kind).from_pretrained(tmp_path / "out", dtype="auto")
    same(again.state_dict(), theirs.state_dict())


def test_converted_config_and_what_does_not_fit(upshift, llama, tmp_path):
    """Parts of a config name their dtype, too; fp16 holds no more than 65,504; whole numbers stay; a class may be unknown."""
    save_file({"a": torch.tensor([1e5, 1.0, float("inf")]), "b": torch.arange(3)}, tmp_path / "model.safetensors")
    config = {"model_type": "of tomorrow", "torch_dtype": "float32", "vision_config": {"dtype": "float32"}, "pad": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = upshift("convert", tmp_path, "-o", tmp_path / "out", "--dtype", "float16", "--json")
    assert "a: 1 numbers are beyond what float16 holds" in answer.err
    assert json.loads(answer.out)["noted"] == {"a": 1}
    same(tensors_of(tmp_path / "out"), {"a": torch.tensor([1e5, 1.0, float("inf")]).half(), "b": torch.arange(3)})
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said == config | {"torch_dtype": "float16", "vision_config": {"dtype": "float16"}}


def test_pickled_weights_become_safetensors(upshift, llama, tmp_path):
    """Through the reader that runs no code."""
    shutil.copy(llama / "config.json", tmp_path)
    torch.save(tensors_of(llama), tmp_path / "pytorch_model.bin")
    assert upshift("convert", tmp_path, "-o", tmp_path / "out", "--dtype", "bfloat16").code == 0
    same(tensors_of(tmp_path / "out"), {name: tensor.bfloat16() for name, tensor in tensors_of(llama).items()})
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


def test_files_beside_the_weights(upshift, llama, tmp_path):
    """A model of Sentence Transformers names folders; one with weights of its own is not one checkpoint."""
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    (model / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "../.."}]))
    for name in ("1_Pooling", "onnx"):
        (model / name).mkdir()
        (model / name / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    assert upshift("shard", model, "-o", tmp_path / "out").code == 0
    assert (tmp_path / "out" / "1_Pooling" / "config.json").is_file() and not (tmp_path / "out" / "onnx").exists()
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    (model / "1_Pooling" / "model.safetensors").write_bytes(b"")
    one_line(upshift("shard", model, "-o", tmp_path / "other"), "weights in 1_Pooling")
