"""docs/paper.md, written from the results of scripts/reproduce_paper.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markdown_prose import wrap_prose
from markdown_table import make_table

from jpaged.simulation.paper import latency
from jpaged.simulation.paper.reasons import REASONS
from jpaged.simulation.paper.setting import LABELS, SUSTAINED
from jpaged.simulation.paper.sharing import prefix_ratios

INTRODUCTION = """# The PagedAttention paper's tables, reproduced

Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023. Made by

```
python scripts/reproduce_paper.py --all
```

which needs no model, no trace and no GPU. On {machine} with nothing else running, and no program compiled before, the
figures took {minutes:.1f} minutes in all (Fig. 19 in a run of its own, the others in one; the machine's speed drifts: a
run of all took a third longer on another day):

{seconds}

Each figure says whether it is simulated or measured; nothing here ran on an A100.

**Simulated** means: this engine's scheduler, prefix index and block accounting (and contiguous memory under a buddy
allocator, as the paper says its versions of Orca work) on a model of OPT-13B's speed on an A100-40GB, with the
15,728 slots of KV that the paper's 12 GB are. The simulator plans what the real engine plans, block by block, with
several outputs and beams too (`tests/jpaged/test_simulation_real.py`). **Measured** means: the real kernels and the
real engine on this machine's CPU, with random weights in SmolLM2-135M's shape.

## Assumptions

Taken from the paper to set the simulation up, and therefore no findings:

- the means of the lengths, 161 and 338 (ShareGPT), 19.3 and 58.5 (Alpaca, drawn geometrically). ShareGPT lengths
  are real ones, by another tokenizer, bent to the paper's means ("sharegpt"). How unequal they are follows from the
  row "Orca (Max)" of Fig. 2. "sharegpt scaled" is only multiplied, "sharegpt ours" as it is;
- what its software adds to a step, 8 ms and 0.34 ms a request, from vLLM's two values in Fig. 13 by Little's law.
  So that ours is near vLLM's at its rates says little; that the three versions of Orca are near theirs does, and so
  does ours with a queue that is never empty, which depends on memory alone.

Chosen here, where the paper says nothing:

- a step takes what its bytes or its products take, whichever is more, at 90 % of the A100's 1.555 TB/s and 312
  TFLOP/s;
- a rate counts as sustained while the mean of latency over output tokens is below {limit} s/token, a line drawn
  across Fig. 12, 14 and 16; of several outputs, the tokens of one count. In Fig. 12 half or twice that line moves
  rates by 4 to 14 %, and ours over Orca (Oracle) by at most 0.1;
- of several outputs or beams a request's 0.34 ms are counted once: the paper's values are of requests with one
  (what the other way does to six beams is under Fig. 14);
- the Orca systems run the same model of speed, admit whoever fits, first come, first served, and compute a prompt
  in the step that admits it. They keep the memory of each output and each beam apart, and copying a beam's memory
  costs them nothing, which is in their favour;
- requests come at random times (Poisson), 60 s to two hours of them, one seed; every rate has the same requests. A
  rate that is just sustained is looked for between two rates, 5 % apart in the end;
- at most 256 sequences run at once and a step has at most 2,560 tokens, vLLM's defaults at the time; no request is
  longer than 2,048 tokens; prefixes are shared in Fig. 16 alone;
- of Fig. 16: a sentence and its translation have 40 tokens each on average (geometric); of Fig. 19: PCIe 4.0 at 25
  GB/s, and 5 us for each transfer besides, one for each block and layer and for keys and values apart, as vLLM
  copied.

## What differs from the paper

- On Alpaca ours runs more at once than vLLM at 30 requests/s: these constants leave it close to overload there,
  where the queue's length hangs on small differences in speed.
{outputs}- Fig. 15: parallel sampling shares more on Alpaca than the paper's 6.1 to 9.8 %, beams more on both.{shapes}
"""

OUTPUTS = """\
- Fig. 14: with six beams ours over Orca (Oracle) is {six}, the paper's 2.3, and {base} where the queue is never empty.
  What that hangs on, one thing changed at a time (second table under Fig. 14): at most 256 sequences run at once, and
  with beams that limit is reached before memory is full; with 1,024 it is {most}. While that limit holds it does not
  matter that the beams here share more ({saved} % of blocks; the paper 55.2): {steady_ratio} with the paper's share,
  {both} with it and 1,024. The paper's versions of Orca may have had to copy beams' memory: if they do here, {copies}.
  Outputs that are less equal, of the same mean: {shape}. Software's 0.34 ms for every beam: {each}. Besides, the
  scheduler has to count once what beams share: one that counts each beam's blocks apart runs fewer, and comes to 1.93.
"""

SHAPES = """ The second table under Fig. 15 has
  parallel sampling with the same means in other shapes: the more unequal the outputs, the less is saved ({most} to
  {least} % with 6), since most blocks then belong to long outputs, which share nothing. With lognormal outputs of
  spread 1 ours is near the paper's range: the shape alone, which the paper does not tell, can explain it."""


def write_page(results: dict[str, Any], path: Path) -> None:
    """Every figure that `results` has, in order."""
    taken = {f"Fig. {name}": results[name]["seconds"] for name in SECTIONS if name in results}
    times = dict(
        machine=_machine(next(iter(results.values()))["machine"]),
        minutes=sum(taken.values()) / 60,
        seconds=make_table(["", *taken], [["seconds", *(f"{each:.0f}" for each in taken.values())]]),
    )
    shapes = [row["saved, 6"] for row in results["15"]["tables"]["shapes"]] if "15" in results else []
    reason = SHAPES.format(most=f"{max(shapes):.1f}", least=f"{min(shapes):.1f}") if shapes else ""
    parts = [INTRODUCTION.format(limit=SUSTAINED, shapes=reason, outputs=_differs(results), **times)]
    for name, write in SECTIONS.items():
        if name in results:
            about = results[name]["machine"]
            parts.append(write(results[name]["tables"], _machine(about), about["dtype"]))
    path.write_text(wrap_prose("\n".join(parts)))


def _differs(results: dict[str, Any]) -> str:
    """What is said of Fig. 14, if it is there."""
    if "14" not in results:
        return ""
    tables = results["14"]["tables"]
    ratios = {
        (row["method"], row["outputs"]): row["ratio"]
        for row in latency.sustained(tables["latencies"])
        if row["system"] == LABELS["oracle"]
    }
    rows = {row["what"]: row for row in tables["reasons"]}
    values = {name: f"{row['ratio']:.2f}" for name, row in rows.items()}
    base, *changed = REASONS
    names = ("steady_ratio", "copies", "shape", "each", "most", "both")
    return OUTPUTS.format(
        six=f"{ratios['beam', 6]:.2f}",
        base=values[base],
        saved=f"{rows[base]['saved']:.0f}",
        **dict(zip(names, (values[name] for name in changed), strict=True)),
    )


def _memory(tables: dict, machine: str, dtype: str) -> str:
    names = ("token_states", "reserved", "internal", "external")
    table = []
    for row in tables["memory"]:
        values = [f"{row[name]:.1f}" for name in names]
        paper = " / ".join(map(str, row["paper"])) if row["lengths"] == "sharegpt" else ""
        table.append([row["lengths"], row["system"], *values, paper])
    header = ("lengths", "system", "token states %", "reserved %", "internal %", "external and others %", "paper")
    text = "Simulated. Of vLLM the paper gives token states alone. Ours has a queue that is never empty, Orca 2 req/s."
    return _section("Where KV memory goes", "2", text, (header, table))


def _latency(tables: dict, machine: str, dtype: str) -> str:
    table = [
        [row["lengths"], row["system"], f"{row['sustained']:.2f}", f"{row['ratio']:.2f}", row["paper"]]
        for row in latency.sustained(tables["latencies"])
    ]
    header = ("lengths", "system", f"requests/s at {SUSTAINED} s/token", "ours over it", "paper")
    text = "Simulated. The paper's ranges are over its three models; the 1.3 is of this model."
    return _section("Latency against rate", "12", text, (header, table))


def _outputs(tables: dict, machine: str, dtype: str) -> str:
    table = [
        [row["method"], row["outputs"], row["system"], f"{row['sustained']:.2f}", f"{row['ratio']:.2f}", row["paper"]]
        for row in latency.sustained(tables["latencies"])
    ]
    header = ("method", "outputs", "system", f"requests/s at {SUSTAINED} s/token", "ours over it", "paper")
    text = """\
Simulated, Alpaca lengths. The paper says that ours over Orca (Oracle) goes from 1.3 with one output (above) to 2.3
with six beams. Which beams go on depends on what a model says, and a simulation has no model: **the beams here do
what those of SmolLM2-135M-Instruct did on two dozen instructions**, recorded from the real engine
(`scripts/bench_sharing.py record`) and played back, each group one of the recorded ones. What they
save by this (Fig. 15 below: 41 to 68 % on Alpaca, 48 to 80 % on ShareGPT) is what the real engine was measured to save
with another small model (43 to 68 %, 46 to 76 %: `docs/benchmarks.md`, "Blocks saved by sharing")."""
    reasons = [
        [row["what"], f"{row['ours']:.0f}", f"{row['oracle']:.0f}", f"{row['ratio']:.2f}", f"{row['saved']:.1f}"]
        for row in tables["reasons"]
    ]
    under = ("six beams, queue never empty", "tokens/s, ours", "Orca (Oracle)", "ours over it", "blocks saved %")
    return _section("Several outputs, and beams", "14", text, (header, table), (under, reasons))


def _batches(tables: dict, machine: str, dtype: str) -> str:
    table = [
        [row["lengths"], row["system"], f"{row['rate']:g}", f"{row['batch']:.2f}", f"{row['paper']:.2f}"]
        for row in tables["batches"]
    ]
    header = ("lengths", "system", "requests/s", "mean batched requests", "paper")
    return _section("How many run at once", "13", "Simulated.", (header, table))


def _sharing(tables: dict, machine: str, dtype: str) -> str:
    table = [
        [row["method"], row["lengths"], row["outputs"], f"{row['saved']:.1f}", row["paper"]]
        for row in tables["savings"]
    ]
    header = ("method", "lengths", "outputs or beams", "blocks saved %", "paper, 2 to 6")
    shapes = [
        [row["prompts"], row["outputs"], *(f"{row[f'saved, {n}']:.1f}" for n in (2, 4, 6))] for row in tables["shapes"]
    ]
    under = ("prompts", "outputs", "saved %, 2 outputs", "4", "6")
    text = (
        "Simulated, beams as in Fig. 14. Then parallel sampling on Alpaca's means in other shapes, lognormal by spread."
    )
    return _section("What several outputs share", "15", text, (header, table), (under, shapes))


def _prefix(tables: dict, machine: str, dtype: str) -> str:
    table = [
        [row["prefix"], row["system"], f"{row['sustained']:.2f}", f"{row['ratio']:.2f}", row["paper"] or ""]
        for row in prefix_ratios(tables["latencies"])
    ]
    header = ("tokens in common", "system", f"requests/s at {SUSTAINED} s/token", "ours over it", "paper")
    measured = [list(row.values()) for row in tables["measured"]]
    text = f"""\
The first table is simulated with the real prefix index, LLaMA-13B on the A100, over the paper's baseline, Orca
(Oracle). The second is measured on {machine}: output tokens/s of 16 requests with the prefix cache on and off, in
turns (`python scripts/bench_sharing.py prefix --dtype {dtype}`)."""
    return _section("A prefix in common", "16", text, (header, table), (list(tables["measured"][0]), measured))


def _block_size(tables: dict, machine: str, dtype: str) -> str:
    overhead = [list(row.values()) for row in tables["overhead"]]
    text = f"""\
(a) is measured on {machine}: decode attention of one layer, with blocks of 16 in random order and, by the same
kernel, with all of a sequence in one block, in turns; beside it XLA's attention over contiguous KV. The paper has
20 to 26 % more for its kernel on the A100, over FasterTransformer's. (b) is simulated; how much slower the kernel
is with small blocks is what was measured here (third table), for want of the A100's, so the left half of these
curves is a CPU's."""
    by_size = [[row["block size"], row["us"], row["slowdown"]] for row in tables["by block size"]]
    latencies = [list(row.values()) for row in tables["latencies"]]
    return _section(
        "What paging costs, and block sizes",
        "18",
        text,
        (list(tables["overhead"][0]), overhead),
        (list(tables["latencies"][0]), latencies),
        (("block size", "us a layer, 32 x 256 tokens", "over the fastest"), by_size),
    )


def _swap(tables: dict, machine: str, dtype: str) -> str:
    simulated = [list(row.values()) for row in tables["simulated"]]
    measured = [list(row.values()) for row in tables["measured"]]
    sizes = " ".join(str(row["block size"]) for row in tables["measured"])
    text = f"""\
The first table is simulated: 256 tokens of OPT-13B copied one way and computed again on the A100, and ShareGPT
requests at 2.3 requests/s, whose latency is in s/token. The paper: the cost of recomputing does not depend on the
block size, small blocks make swapping slow, and from 16 to 64 they are comparable. The second is measured on
{machine}
(`python scripts/bench_sharing.py swap --dtype {dtype} --block-size {sizes} --repeats 2`):
there all blocks of a step are gathered into one copy, so that small blocks cost little, and memory and "device" share
one bus, so that copying is nearly free beside computing."""
    return _section(
        "Swapping beside recomputing",
        "19",
        text,
        (list(tables["simulated"][0]), simulated),
        (list(tables["measured"][0]), measured),
    )


SECTIONS = {
    "2": _memory,
    "12": _latency,
    "13": _batches,
    "14": _outputs,
    "15": _sharing,
    "16": _prefix,
    "18": _block_size,
    "19": _swap,
}


def _section(title: str, number: str, text: str, *tables: tuple[Sequence[str], Sequence[Sequence[Any]]]) -> str:
    image = f"![Fig. {number}](figures/paper_fig{number}.png)"
    made = [make_table(header, rows) for header, rows in tables]
    return "\n\n".join([f"## {title} (Fig. {number})", image, text, *made]) + "\n"


def _machine(machine: dict[str, Any]) -> str:
    return f"{machine['cores']} cores of {machine['cpu']} ({machine['kernels']} kernels)"
