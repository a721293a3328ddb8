"""The words of docs/accuracy_published.md."""

PAGE = """# Accuracy against published measurements

Made by `python benchmarks/cases/published.py{asked} --write docs/accuracy_published.md`. Each row of
[benchmarks/published](../benchmarks/published/README.md) that says its layout was predicted from its config, its hardware's
table row, its settings and what its source's program is documented to do
([published_programs.py](../benchmarks/cases/published_programs.py)); errors are predicted / measured - 1. {count} rows. Rows of
adapters are not among them. Left out:

{skipped}

Memory is that of a plan with the same choices: SimuMax ran Megatron-LM (bf16 weights, the rest by its distributed optimizer,
words divided, fused kernels and loss), torchtitan keeps every second product of a recomputed layer and divides words. A source
that says nothing is predicted as Hugging Face modules with their own loss. Reserved memory is the allocator's, without context
and NCCL. Against the same program on gloo ranks errors are 0 to 3 % (tests/cpu/test_layouts.py). Rates of the A100 and H100
were fitted, three factors each, on LLM Foundry's MPT 125M, 760M, 3B, 13B and 70B, those of the B200 on SimuMax's Llama 3 70B
(src/upshift/planning/cost/rates.py), and how long ranks wait for the slowest node on LLM Foundry's same five models; all other
rows were in no fit, SimuMax's mixtures of experts among them, and nothing about memory was fitted. Of SimuMax's rows that differ
in the number of micro-batches alone, memory was measured once: 19 measurements of allocated memory.

bigscience (Megatron-DeepSpeed) and Calculon's restatement of Megatron-LM's table ran GPT with fused softmax over whole scores on
A100; no Hugging Face class of theirs says how ranks divide it, so GPT-NeoX of the same widths is predicted, with attention as one
kernel: what moving the scores takes is missing. bigscience's memory is whole "GB" of nvidia-smi, for the whole device. torchtune
ran one device all in bf16; what its rows turned on beside is read from their notes. MaxText's rows are of TPUs, for which no
training is planned. Inference (TensorRT-LLM and others): [inference_planning.md](inference_planning.md).

tau is Kendall's, over pairs of rows whose measured speeds differ by more than 2 %: among all rows of a model, on any host and of
any length, and among those of one length, which differ in the number of devices and in the micro-batch, mostly by a few percent.

{tables}

## The worst rows first

{worst}
"""
