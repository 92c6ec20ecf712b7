"""What `hone --help` prints: every verb with a line about it."""

from __future__ import annotations

HELP = """hone: language models cheap to build and cheap to run, and what every optimization cost and saved.

usage: hone VERB [ARGUMENT] [--field=value ...]

a whole recipe
  plan RECIPE       time, memory and disk of every stage, and whether it fits, before anything is made
  plan GOAL         the best ways to train, compress and serve within limits: a search with a front and a recipe for each row
  run RECIPE        make every missing stage of a recipe, then its report
  report LINE       write the report of a line's artifacts again
  watch FOLDER ...  a page in the browser of trainings that run or are finished
one stage (hone VERB --help lists its fields; --plan prints its estimates, --plan --mesh=1024xH200 for ranks elsewhere)
  data SOURCE ...   text to curated, tokenized, packed shards
  train DATA        a model from packed shards
  teach MODEL       a model's log-probabilities of data on disk, for distillations
  compress MODEL    quantize, prune
  eval MODEL        perplexity, bits per byte, distance to a reference
  bench MODEL       a measured serving run: tokens/s, latency, memory
  simulate MODEL [TRACE]   a serving run under a predicted clock, on any machine
object stores (s3://, gs://, ...)
  push FOLDER URL   copy an artifact to a URL; one with hone.json is whole
  pull URL FOLDER   copy an artifact from a URL, checking every file
using a model
  serve MODEL       an OpenAI-compatible server, with a page to chat with the model
  chat MODEL        talk with a model in the terminal, or with that of a running server (--url)
  generate MODEL PROMPT   continue a text
  merge ADAPTER     an adapter added to the weights of its model: a model folder
  export MODEL      one file for another program: GGUF for llama.cpp
planning
  hardware [NAME ...]   accelerators, links, prices, grids; with names: compared
  cost WORD         a calculator: formulas with their numbers
  schedule JOBS     hours and sites of little carbon for jobs with deadlines
looking
  show THING        print a recipe, an artifact or a model folder
  redecide DATA     what other filters would keep of a data stage's input
  schema [STAGE]    the JSON schema of a stage, or of all
  techniques [SLOT] every technique: slot, name, paper, file
  env               versions, machine and settings, for a bug report
  calibrate         measure this machine's bandwidth and matmul rates, for estimates; --report: its whole memory hierarchy
  completion SHELL  a script with which bash, zsh or fish completes all of this

options of a stage: --out=FOLDER --device=cpu|cuda --plan --redo --quiet; of run: --work=FOLDER --device --redo[=STAGE] --quiet
for train, compress, run and calibrate also: --nproc_per_node=N (ranks to start on this host; with --device=cuda one GPU each, or gpu for all)
for all but plans also: --numa_binding=auto|none|node|socket|exclusive|core-complex (where processes run, as torchrun names it)
for data also: --executor=serial|processes|ray|slurm --workers=N (the files are the same with each)
for train and run also: --wandb.project=NAME --wandb.entity --wandb.name --wandb.mode=online|offline (curves go to Weights & Biases, too)
  --profiling.enable_profiling --profiling.profile_freq=10 --profiling.enable_memory_snapshot (traces of steps, and what fills a GPU)
for train, bench, serve and run also: --clock.kind=fixed|max_slowdown|zeus|by_phase|thermal --clock.FIELD=VALUE (the GPU's clock, given back at the end)
  --power_trace (what the device draws, in log/power.csv; not of serve)
"""
