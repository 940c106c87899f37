"""`anyflash` on the command line: demo, doctor, explain, bench.

Commands import what they need when they run, so that `anyflash --help` loads no more than
`import anyflash` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from anyflash.errors import AttentionError

if TYPE_CHECKING:
    from torch import Tensor

RESULTS = Path("results")
PAGE = Path("docs/performance.md")

# What benchmarks on a card have in common.
Quick = Annotated[
    bool, typer.Option("--quick", help="Small sizes, few rounds, short loads: does it work?")
]
Rows = Annotated[str | None, typer.Option(metavar="PATTERN", help="Rows whose name contains this.")]
Output = Annotated[
    Path | None,
    typer.Option(help="A full run goes by itself to results/MACHINE, named as the command."),
]
Bars = Annotated[
    bool, typer.Option("--check", help="Exit with 1 if a bar is missed or not measured, too.")
]
Rounds = Annotated[
    int | None, typer.Option(min=1, help="Rounds in which all sides run; 9, quick 2.")
]
Load = Annotated[
    float | None,
    typer.Option(min=0, help="Each side under load, 0 for not at all; 2, quick 0.2."),
]


class Commands(TyperGroup):
    """Errors that anyflash raises on purpose are one message and exit code 2, not a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AttentionError as error:
            Console(stderr=True).print(Text(f"error: {error}", style="red"), soft_wrap=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="FlashAttention for PyTorch on whatever accelerator is there.",
)
bench = typer.Typer(no_args_is_help=True, help="Measure anyflash against what PyTorch has.")
app.add_typer(bench, name="bench")


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Where pictures and files go.")] = Path("demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Smaller, in seconds.")] = False,
) -> None:
    """Show what anyflash does, on this machine."""
    from anyflash import demo as demonstration

    raise typer.Exit(demonstration.run(output=output, quick=quick))


@app.command()
def doctor() -> None:
    """Say what is here, and for each device which backend serves an ordinary call, or why not."""
    import platform

    import torch

    from anyflash.bench.console import table
    from anyflash.bench.report import Machine, installed
    from anyflash.devices import probe
    from anyflash.dispatch import ORDER

    console = Console()
    machine = Machine.here()
    console.print(
        table(
            ["machine", ""],
            [
                ["processor", machine.cpu],
                ["instruction sets", ", ".join(machine.features) or "not known"],
                ["cores, threads", f"{machine.cores}, {machine.threads}"],
                ["memory", f"{machine.memory_gb:g} GB"],
                ["system", machine.system],
            ],
        )
    )
    found = {"python": platform.python_version(), "torch": torch.__version__}
    found |= {n: installed(n) or "not installed" for n in ("anyflash", "triton", "transformers")}
    console.print(table(["package", "version"], [[n, v] for n, v in found.items()]))
    devices = _devices()
    rows = [[d, probe(d).name, ", ".join(sorted(probe(d).features))] for d in devices]
    console.print(table(["device", "name", "features"], rows))
    rows = []
    for kind in dict.fromkeys(torch.device(d).type for d in devices):
        explained = _ordinary(kind)
        for name in ORDER:
            sentence = explained.refusals[name]
            chosen = "yes, by default" if name == explained.chosen else "yes"
            rows.append([kind, name, "no" if sentence else chosen, sentence or ""])
    console.print(table(["device", "backend", "serves", "why not"], rows))
    console.print(f"asked about: {_ordinary('cpu').problem.describe()}", style="dim", markup=False)


@app.command()
def explain(
    batch: Annotated[int, typer.Option(min=0)] = 1,
    heads: Annotated[int, typer.Option(min=0, help="Query heads.")] = 8,
    heads_kv: Annotated[
        int | None, typer.Option(min=0, help="Key and value heads; as many as query heads.")
    ] = None,
    queries: Annotated[int, typer.Option(min=0, help="Of each sequence.")] = 1024,
    keys: Annotated[int | None, typer.Option(min=0, help="As many as queries.")] = None,
    head_dim: Annotated[int, typer.Option(min=0)] = 64,
    head_dim_v: Annotated[int | None, typer.Option(min=0, help="As head-dim.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 on a CPU, elsewhere bfloat16, if not given.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or mps, present here or not; the best that is.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal")] = False,
    window: Annotated[
        str | None, typer.Option(metavar="LEFT,RIGHT", help="An empty side is unbounded: 512,")
    ] = None,
    documents: Annotated[
        int | None, typer.Option(min=1, help="That many documents that do not see each other.")
    ] = None,
    softcap: Annotated[float | None, typer.Option()] = None,
    scale: Annotated[float | None, typer.Option(help="1/√D.")] = None,
    dropout: Annotated[float, typer.Option()] = 0.0,
    sink: Annotated[bool, typer.Option("--sink")] = False,
    bias: Annotated[bool, typer.Option("--bias", help="A full bias (B, Hq, Sq, Sk).")] = False,
    alibi: Annotated[bool, typer.Option("--alibi")] = False,
    varlen: Annotated[
        bool, typer.Option("--varlen", "--packed", help="Packed, as attention_varlen takes it.")
    ] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic")] = False,
    precision: Annotated[str | None, typer.Option(help="fp8.")] = None,
    backend: Annotated[str | None, typer.Option(help="Ask about this one alone.")] = None,
) -> None:
    """Which backend would serve a call, why the others would not, and what its mask becomes."""
    import torch

    import anyflash

    device = device or _devices()[-1]
    if bias and alibi:
        raise typer.BadParameter("--bias and --alibi exclude each other: give one")
    keys = queries if keys is None else keys
    heads_kv = heads if heads_kv is None else heads_kv
    masks = [] if window is None else [anyflash.window(*_window(window))]
    if documents is not None:
        ids = [torch.arange(n) * documents // max(1, n) for n in (queries, keys)]
        masks.append(anyflash.documents(ids[0], ids[1]))
    mask = None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1]
    packing = {}
    if varlen:
        starts = [torch.arange(batch + 1, dtype=torch.int32) * n for n in (queries, keys)]
        packing = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    kind = _dtype(dtype, device)
    sides = ((heads, queries, head_dim), (heads_kv, keys, head_dim))
    sides += ((heads_kv, keys, head_dim if head_dim_v is None else head_dim_v),)
    extra: Any = _zeros(batch, heads, queries, keys) if bias else None
    explained = anyflash.explain(
        *(_zeros(batch * n, h, d, dtype=kind) if varlen else _zeros(batch, h, n, d, dtype=kind)
          for h, n, d in sides),
        **packing, mask=mask, causal=causal, scale=scale, softcap=softcap,
        bias=anyflash.alibi(torch.zeros(heads)) if alibi else extra,
        sink=torch.zeros(heads) if sink else None, dropout=dropout, deterministic=deterministic,
        precision=precision, backend=backend, device=device,
    )  # fmt: skip
    Console().print(explained)


@bench.command("cpu")
def bench_cpu(
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes and few rounds: does it work?")
    ] = False,
    only: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Cases whose name contains this.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Result file; a full run goes to results/MACHINE/cpu.json by itself."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if a bar is missed, too.")
    ] = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds in which both sides run; 15, quick 2.")
    ] = None,
) -> None:
    """Against PyTorch's attention on this CPU; exit code 1 if a result is wrong."""
    from anyflash.bench import cases, console, report, suite
    from anyflash.bench.render import summary_table
    from anyflash.bench.suite import Settings

    _no_quick_bars(quick, check)
    chosen = cases.select(cases.CPU, only)
    settings = Settings(rounds or 2, 0.01, True) if quick else Settings(rounds or Settings.rounds)
    chosen = [case.quick for case in chosen] if quick else chosen
    screen = Console()
    source = report.source()  # of the code that is loaded now: files may change meanwhile
    results = console.measure(
        chosen, lambda case, tell: suite.run_case(case, settings, tell), settings.rounds, screen
    )
    screen.print(console.table(*summary_table(results)))
    made = report.Report.of(report.CPU, settings, results, source)
    console.write(made, output, RESULTS, quick or only is not None, screen)
    wrong = [r.case.name for r in results if not r.passed]
    missed = [r.case.name for r in results if r.passed and r.met is False]
    raise typer.Exit(console.tell(wrong, {"bar missed": missed}, check, screen))


@bench.command("hopper-forward")
def bench_hopper_forward(
    quick: Quick = False,
    rows: Rows = None,
    ablations: Annotated[
        bool, typer.Option("--ablations", help="Variants of the kernel as well, as more rows.")
    ] = False,
    output: Output = None,
    check: Bars = False,
    rounds: Rounds = None,
    sustained_seconds: Load = None,
) -> None:
    """The forward pass on a Hopper card against cuDNN and FlashAttention-2, with its power."""
    from anyflash.bench import report
    from anyflash.bench.hopper import ablations as variants
    from anyflash.bench.hopper import command, goals, render, suite
    from anyflash.bench.hopper.rows import ROWS

    _no_quick_bars(quick, check)
    table = ROWS + variants.ROWS if ablations else ROWS
    what = command.Suite(
        report.HOPPER_FORWARD, table, suite.run_row, render.summary_tables, goals.failures
    )
    asked = command.Asked(quick, rows, output, check, rounds, sustained_seconds)
    raise typer.Exit(command.run(what, asked, RESULTS))


@bench.command("hopper-backward")
def bench_hopper_backward(
    quick: Quick = False,
    rows: Rows = None,
    ablations: Annotated[
        bool, typer.Option("--ablations", help="Variants of the kernels as well, as more rows.")
    ] = False,
    output: Output = None,
    check: Bars = False,
    rounds: Rounds = None,
    sustained_seconds: Load = None,
) -> None:
    """The backward pass on a Hopper card, by each algorithm, against cuDNN and FlashAttention-2."""
    from anyflash.bench import report
    from anyflash.bench.hopper import command
    from anyflash.bench.hopper.backward import ablations as variants
    from anyflash.bench.hopper.backward import goals, render, suite
    from anyflash.bench.hopper.backward.rows import ROWS

    _no_quick_bars(quick, check)
    table = ROWS + variants.ROWS if ablations else ROWS
    what = command.Suite(
        report.HOPPER_BACKWARD, table, suite.run_row, render.summary_tables, goals.failures
    )
    asked = command.Asked(quick, rows, output, check, rounds, sustained_seconds)
    raise typer.Exit(command.run(what, asked, RESULTS))


@bench.command("render")
def bench_render(
    results: Annotated[Path, typer.Option(help="Folder of result files.")] = RESULTS,
    page: Annotated[Path, typer.Option(help="The page to bring up to date.")] = PAGE,
) -> None:
    """Bring the tables of docs/performance.md up to date with the result files."""
    from anyflash.bench.render import render

    files = render(results, page)
    Console().print(f"{page}: {len(files)} result files", markup=False, soft_wrap=True)


def _no_quick_bars(quick: bool, check: bool) -> None:
    if quick and check:
        raise typer.BadParameter("--check holds the bars of full sizes: leave out --quick")


def _devices() -> list[str]:
    """The devices that are here, the CPU first."""
    import torch

    found = ["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))]
    return [*found, "mps"] if torch.backends.mps.is_available() else found


def _ordinary(device: str) -> Any:
    """What `doctor` asks about: self-attention without anything special."""
    import anyflash

    x = _zeros(1, 8, 1024, 64, dtype=_dtype(None, device))
    return anyflash.explain(x, x, x, device=device)


def _zeros(*shape: int, dtype: Any = None) -> Tensor:
    """A tensor of any size that takes no memory."""
    import torch

    return torch.zeros((), dtype=dtype).expand(shape)


def _dtype(name: str | None, device: str) -> Any:
    import torch

    if name is None:
        return torch.float32 if device == "cpu" else torch.bfloat16
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise typer.BadParameter(f"--dtype {name}: expected a name such as float16 or bfloat16")
    return found


def _window(text: str) -> tuple[int | None, int | None]:
    sides = [side.strip() for side in text.split(",")]
    if len(sides) != 2 or not all(side == "" or side.isdigit() for side in sides):
        raise typer.BadParameter(
            f"--window {text}: expected LEFT,RIGHT such as 512,0, an empty side for no bound"
        )
    left, right = (int(side) if side else None for side in sides)
    return left, right
