"""The words of docs/accuracy_published.md."""

PAGE = """# Predictions against published measurements

Other people measured how fast transformers train on GPUs and published the numbers. Upshift predicted the same runs from the
model's config, the GPUs and the settings. This page compares the two. An error of +10 % means that the prediction is 10 % more
than the measurement: more tokens per second, or more memory.

{left_out}

{summary}

These runs train whole models: none of them uses an adapter (LoRA). They ran in other programs, such as Megatron-LM, LLM Foundry
and torchtitan. The option `--program` of `upshift plan` predicts for some of them. Upshift itself was measured on one GPU, with
eight settings of BERT-large ([GPU check](gpu_check.md#bert-large-by-eight-settings)).

## Speed

{speed}

- **Mean error** and **median error** are of the sizes of the errors. **Bias** is the median error with its sign.
- **Order** says how well predictions rank the rows of one model (Kendall's tau): 1 is the measured order, 0 is no relation,
  -1 is the reverse. Pairs of rows whose measured speeds differ by less than 2 % are not compared. **Order at one length** ranks
  the rows of one sequence length, which often differ by a few percent only.
- **Used for fitting**: some constants of the formulas were fitted to these rows. All other rows test the formulas.

## Each source left out

The factors of a chip were fitted to some of these sources. So the table above is partly about the fit. Here, for each source, the
factors of its chip are fitted again to the other sources, and the source is predicted with them. The fit starts from the mean of
the factors that were not fitted to the source. A chip that no other source measured gets this mean. *Today* is the prediction
with the factors that Upshift uses.

{left_out_table}

```console
python benchmarks/cases/leave_one_out.py        # prints this table from the rows, in half a minute
```

- **Within 25%**: the share of runs whose error is at most 25 %. The goal is 90 %.
- **In interval**: the share of runs whose time lies in the interval that the *other* sources give. The goal is 90 %. It is
  wider on a kind of GPU that no other source measured.

The command prints an interval by program. It is made from all sources in the same way: each source counts once, and the sources
of the program twice.

{intervals}

No published run is one of Upshift's own loop.

pytorch/ao says that its B200 had limited power, and torchtitan that its H100 had 500 W. So these rows are judged, but no factor
is fitted to them: they show the limit, and not the chip.

## Memory

{memory}

*Allocated* is what tensors take. *Reserved* is what PyTorch's allocator holds for them. *Device* is all memory in use on the GPU,
with the CUDA context and other libraries.

## How the runs were predicted

- A prediction uses the row's settings and what its program is documented to do
  ([published_programs.py](../benchmarks/cases/published_programs.py)). A program about which nothing is known is predicted as a
  transformers model with its own loss.
- Two factors of the A100 and two of the H100 were fitted to LLM Foundry's MPT-125M, 760M, 3B, 13B and 70B: of matrix products and
  of memory traffic. So was the time that ranks wait for the slowest node. The B200's two factors were fitted to SimuMax's Llama 3
  70B and to NVIDIA's Llama 3 8B and 70B in fp8 ([rates.py](../src/upshift/planning/cost/rates.py)). NVIDIA's rows do not state
  recomputation, so they are not in the tables. Its recipes recompute nothing there. No constant of memory was fitted.
- The rate of attention was fitted to no row. It is what the program's kernel reaches alone on the chip, as its authors measured
  ([efficiency.py](../src/upshift/hardware/catalog/efficiency.py)): FlashAttention 1 (Triton) in LLM Foundry, FlashAttention 2
  behind torch's `sdpa` of 2024, cuDNN in Transformer Engine and in torch 2.13 on H100 and B200.
- torchtitan's H100 have memory with 2.4 TB/s, as it says. Their predictions use this figure.
- SimuMax published some runs twice, once for each kind of memory. Their speed counts once. Its runs that differ in the number of
  micro-batches only have one measurement of memory: 43 rows of allocated memory are 19 measurements.
- bigscience (Megatron-DeepSpeed) and Calculon trained an older GPT that Upshift cannot divide over GPUs. GPT-NeoX of the same
  size is predicted in its place. That prediction leaves out the time to move the attention scores, so it is too fast. bigscience
  read its memory from nvidia-smi, in whole GB.
- bigscience's nodes have four Omni-Path links of 100 Gb/s ([arXiv 2211.05100](https://arxiv.org/abs/2211.05100)). Two things
  about its rows are not predicted. In 14 rows the width of a head is no multiple of 8: their median error is +41 %, that of the
  others +7 %. And 42 rows on several nodes were measured before the links inside the nodes were repaired: +16 %, against +3 %
  afterwards.
- Products in fp32 keep the rate of single kernels. The factors of matrix products are those of tensor cores, which lower their
  clocks under load.
- torchtune's runs were on one GPU with everything in bf16. Their other settings come from its notes.
- MaxText's rows are of TPUs, for which Upshift plans no training.
- Predicted inference is on [another page](inference_planning.md).

## Rows left out

A prediction needs every setting. These rows do not state one, or use what Upshift cannot plan:

{skipped}

## All rows, the worst first

{worst}

This page is made by `python benchmarks/cases/published.py{options} --write docs/accuracy_published.md`. The published numbers,
with links to where they stand, are in [benchmarks/published](../benchmarks/published/README.md).
"""
