"""`mars-jax plan`: find the TPU slice that a pair of models needs, without a TPU and without weights."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from mars_jax.cli.flags import add_flags, number_parser
from mars_jax.cli.program import Parser, command
from mars_jax.cli.progress import busy
from mars_jax.cli.rule_flags import add_rule_flags, is_number
from mars_jax.drafters.registry import definition, parse_draft, published_heads
from mars_jax.drafters.tree_shapes import parse_tree
from mars_jax.lab.commands.pair import chosen_rule
from mars_jax.utils.errors import MarsError
from mars_jax.utils.settings import DTYPES
from mars_jax.verify import NEEDS

if TYPE_CHECKING:
    from mars_jax.core.drafter import Drafter
    from mars_jax.lab.planning.chips import Topology
    from mars_jax.lab.planning.estimate import StepTime
    from mars_jax.lab.planning.fit import Attempt, DraftEstimate, DraftShape, Plan
    from mars_jax.models.config import ModelConfig
    from mars_jax.models.shardings import AnyConfig

_DESCRIPTION = """\
Compile the decode loop of a pair of models ahead of time for a TPU slice. Report whether
it fits, the memory of each chip, the traffic between chips, the least time of a step by its
bytes and operations, and an estimate of the step with and without the draft. Needs libtpu,
but no TPU.
"""
_EPILOG = """\
examples:
  mars-jax plan --target llama-3.1-8b --draft eagle3 --topology v5e:2x2
  mars-jax plan --target qwen3-235b-a22b --topology v5p:2x2x4 --batch 8 --json
  mars-jax plan --target PATH/config.json --draft model:llama-3.2-1b \\
      --topology v6e:1x1

A target is a name (vicuna-13b, llama-3.1-8b, llama-3.2-1b, llama-3.3-70b, qwen3-8b,
qwen3-32b, qwen3-235b-a22b, gpt-oss-20b, gpt-oss-120b), a config.json or a directory with
one, or a name on the Hugging Face hub (only the config is read). Slices are named
generation:shape, such as v5e:4x4, v6e:2x4, v4:2x2x1, v5p:2x2x2 and tpu7x:2x2x1, or as in
Google Cloud: v5litepod-8 and v6e-8 count chips; v4-8, v5p-8 and tpu7x-8 count cores, two per
chip. Exit code 1 means that the pair does not fit. The command then tries weights in fewer
bits and larger slices until one fits. With --acceptance, a chain and trees of 7 and 10 levels
are compared. For a mixture of experts, where a large draft reads most experts, chains of 3
and 5 and a tree are always compared.
"""
CONTEXT = 4096
"""Default context, in tokens."""
TAUS = (2, 3, 4)
"""Values of tau, in tokens per step, for which the table lists the speed."""
_DRAFTS = f"{', '.join(published_heads())}, model:TARGET, ngram or none"


def parser() -> Parser:
    """Build the argument parser of `mars-jax plan`."""
    plan_parser = Parser(prog="mars-jax plan", description=_DESCRIPTION, epilog=_EPILOG)
    group = plan_parser.add_argument_group("models")
    group.add_argument("--target", required=True, metavar="NAME")
    draft_help = f"{_DRAFTS}; the heads have the published shapes for the target (default: %(default)s)"
    add_flags(group, {"--draft DRAFT": draft_help}, default=next(iter(published_heads())))
    add_flags(group, {"--tree SHAPE": "as for mars_jax.generate"}, type=parse_tree)
    length_help = {"--num-draft-tokens N": "length of a chain (default: the drafter's)"}
    add_flags(group, length_help, type=number_parser("num_draft_tokens"))
    acceptance_help = (
        "probability that a drafted token is accepted, at each depth; the last value applies to all deeper levels. "
        "Without --tree or --num-draft-tokens, draft shapes are compared (default for a mixture of experts: 0.75)"
    )
    add_flags(group, {"--acceptance A,...": acceptance_help}, type=_acceptance)
    add_rule_flags(plan_parser.add_argument_group("rule"))
    group = plan_parser.add_argument_group("slice")
    add_flags(group, {"--topology SLICE": "such as v5e:4x4 or v5litepod-16"}, required=True)
    mesh_help = (
        "such as data=2,model=8 (default: model gets the greatest common divisor of the chips and the key-value "
        "heads; the remaining factor goes to data if it divides the batch, otherwise to model)"
    )
    add_flags(group, {"--mesh AXES": mesh_help})
    parse_batch_size = number_parser("batch_size", shown="--batch")
    add_flags(group, {"--batch N": "rows (default: %(default)s)"}, default=1, type=parse_batch_size)
    context_help = (
        f"tokens of a row, prompt and output (default: {CONTEXT}, or the target's context if it is shorter)"
    )
    parse_context = number_parser("max_new_tokens", shown="--context")
    add_flags(group, {"--context N": context_help}, type=parse_context)
    dtype_help = (
        "dtype of the weights; int8, int4: bits of the target's matrices (default: that of a conversion by mars-jax "
        "convert, else bfloat16); by default and with int4, experts published in MXFP4 keep their 4 bits"
    )
    group.add_argument("--dtype", choices=DTYPES, help=dtype_help)
    group = plan_parser.add_argument_group("output")
    dump_help = (
        "write the decode loop into this folder, as JAX lowers it (decode.stablehlo.txt) and as XLA compiles it "
        "(decode.hlo.txt)"
    )
    add_flags(group, {"--dump DIR": dump_help}, type=Path)
    add_flags(group, {"--json": "print one JSON object and nothing else"})
    return plan_parser


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    return command(lambda argv: parser().parse_args(argv), _run, argv)


def _run(args: argparse.Namespace, out: IO[str]) -> int:
    rule = chosen_rule(args)
    if needs := {"q", "weights"} & rule.needs:
        raise MarsError(f"--verify {rule.name} needs {NEEDS[min(needs)]}: choose another rule for a plan.")

    # Import the planning code only after the checks above, so that they fail fast.
    from mars_jax import verify
    from mars_jax.lab.folder import check_writable
    from mars_jax.lab.planning import fit
    from mars_jax.lab.planning.chips import larger, topology
    from mars_jax.lab.planning.pair_programs import Programs, default_mesh, draft_of, kind_of
    from mars_jax.models.shardings import parse_mesh

    if args.dump is not None:
        check_writable(args.dump, flag="--dump")
        args.dump.mkdir(parents=True, exist_ok=True)
    target, stored_dtype, packs_experts = _read_target(args.target)
    args.context = args.context or min(CONTEXT, target.max_positions)
    # As in `hub.load`, MXFP4 experts stay in 4 bits by default and with int4. Other dtypes dequantise them.
    packed_dtypes = set()
    if packs_experts:
        packed_dtypes.add("int4")
    if packs_experts and not args.dtype:
        packed_dtypes.add("bfloat16")
    args.dtype = args.dtype or stored_dtype
    requested_slice = topology(args.topology)
    draft = _draft(args.draft, target)
    drafter, is_mixture = definition(kind_of(draft)), target.num_experts > 0
    is_recurrent = target.delta is not None
    loaded_rule = verify.load(rule.spec, **rule.settings).rule

    def pair(
        slice_: Topology, dtype: str, draft: AnyConfig | str = draft, shape: DraftShape | None = None
    ) -> Programs:
        """Return the decoding programs for a slice. `--mesh` applies only to the slice that `--topology` names."""
        axes = args.mesh
        if axes is None or slice_ is not requested_slice:
            axes = default_mesh(target, len(slice_.devices), args.batch)
        length, tree = shape or (args.num_draft_tokens, args.tree)
        shaped_draft = draft_of(
            draft, num_draft_tokens=length, tree=tree, dtype=dtype, mixture=is_mixture, chain=is_recurrent
        )
        options = {"batch": args.batch, "context": args.context, "packed_experts": dtype in packed_dtypes}
        mesh = parse_mesh(axes, slice_.devices)
        return Programs(target, shaped_draft, mesh, loaded_rule, dtype=dtype, **options)

    def attempt(name: str | None, dtype: str) -> Attempt:
        slice_ = requested_slice if name is None else topology(name)
        return fit.try_fit(pair(slice_, dtype), slice_)

    def step(shape: DraftShape) -> StepTime | None:
        """Return the time of a step with a draft of a different shape, or None if the step does not fit in memory."""
        shaped_programs = pair(requested_slice, args.dtype, shape=shape)
        # The step with a draft of the usual shape has already been compiled for the plan, and it fits.
        is_planned = shape == drafter.usual(mixture=is_mixture)
        if not is_planned and not fit.try_fit(shaped_programs, requested_slice).fits:
            return None
        return fit.planned_time(shaped_programs, requested_slice)[1]

    def dump(name: str, text: str) -> None:
        if args.dump is not None:
            (args.dump / name).write_text(text, encoding="utf-8")

    with busy("planning"):
        target_programs = pair(requested_slice, args.dtype, "none")
        planned_programs = pair(requested_slice, args.dtype)
        plan = fit.make_plan(planned_programs, target_programs, requested_slice, dump)
    drafts = []
    if args.acceptance is None and is_mixture:
        args.acceptance = [0.75]
    # Compare drafts only if the user left the shape open and the pair supports chains and dynamic trees.
    is_open = args.num_draft_tokens is None and args.tree is None and drafter.dynamic and drafter.resizes
    is_open = is_open and not is_recurrent
    if args.acceptance and is_open and plan.fits:
        with busy("comparing drafts"):
            _, autoregressive_time = fit.planned_time(target_programs, requested_slice)
            shapes = fit.SHAPES if is_mixture else fit.DEEPER
            drafts = fit.compare_drafts(step, autoregressive_time, args.acceptance, shapes)
    attempts = []
    if not plan.fits:
        with busy("looking for what fits"):
            attempts = fit.advise(attempt, args.dtype, larger(plan.topology))
    if args.json:
        input_names = ("target", "draft", "batch", "context", "dtype", "acceptance")
        report = {name: getattr(args, name) for name in input_names} | dataclasses.asdict(plan)
        report["tried"] = [entry._asdict() for entry in attempts]
        report["drafts"] = [entry._asdict() for entry in drafts]
        print(json.dumps(report), file=out)
    else:
        _print_table(args, planned_programs.drafter, plan, attempts, drafts, out)
    return int(not plan.fits)


def _acceptance(text: str) -> list[float]:
    parts = text.split(",")
    if not all(is_number(part) and 0 < float(part) < 1 for part in parts):
        raise MarsError(f"--acceptance is {text}: expected numbers above 0 and below 1, such as 0.8,0.75.")
    return [float(part) for part in parts]


def _read_target(name: str) -> tuple[ModelConfig, str, bool]:
    """Return the config of a target, the default dtype of its plan, and whether its experts are stored in MXFP4."""
    from mars_jax import hub
    from mars_jax.hub import converted, files
    from mars_jax.hub.load import packs_experts
    from mars_jax.lab.planning.outlined_models import CONFIGS, PACKED_EXPERTS

    if name in CONFIGS:
        return CONFIGS[name], "bfloat16", name in PACKED_EXPERTS
    path, dtype = Path(name), "bfloat16"
    if path.name == "config.json":
        path = path.parent
    config = hub.read_config(path)
    if converted.is_converted(path):
        dtype = converted.read_manifest(path).stored
    return config, dtype, packs_experts(files.resolve(path, weights=False))


def _draft(spec: str, target: ModelConfig) -> AnyConfig | str:
    """Parse the value of --draft, and return the draft as a config or a name, for `draft_of`."""
    if spec in published_heads():
        return published_heads()[spec].outline(target)
    try:
        kind, path = parse_draft(spec, among=("none", "ngram", "model"))
    except MarsError:
        raise MarsError(f"--draft is {spec}: expected {_DRAFTS}.") from None
    if kind == "model":
        return _read_target(path)[0]
    return spec


def _step_rows(plan: Plan, batch: int, max_depth: int) -> list[tuple[str, str]]:
    """Return the estimates as table rows, for drafts of at most `max_depth` tokens."""
    step, autoregressive_step = plan.step, plan.autoregressive_step
    # The table of overheads may cover a step without a draft but not one with a draft. The opposite does not occur.
    if autoregressive_step is None:
        return []
    if step is None:
        return [("without a draft, estimated", _milliseconds(autoregressive_step))]
    rows = [
        ("a step, estimated", _milliseconds(step)),
        ("  without a draft", _milliseconds(autoregressive_step)),
    ]
    if step == autoregressive_step:
        return [*rows, ("tokens/s", _speeds(step, batch))]
    # A draft pays off if its step emits more tokens than steps without a draft would emit in the same time.
    low, high = sorted(step[end] / autoregressive_step[end] for end in ("low_seconds", "high_seconds"))
    pays_text = f"{low:.2f} to {high:.2f}"
    if low >= max_depth + 1:
        pays_text += f": never, since a step gives at most {max_depth + 1} tokens"
    rows.append(("a draft pays above tau", pays_text))
    return rows + [(f"tokens/s at tau {tau}", _speeds(step, tau * batch)) for tau in TAUS]


def _shape(drafter: Drafter) -> str:
    # Drafted nodes, without the root.
    nodes, depth = drafter.num_nodes - 1, drafter.max_depth
    if nodes == 0:
        return "no draft"
    if nodes == depth:
        return f"a chain of {depth} tokens"
    return f"a tree of {nodes} nodes, {depth} deep"


def _milliseconds(step: dict[str, float]) -> str:
    return f"{_ms(step['low_seconds'])} to {_ms(step['high_seconds'])} ms"


def _ms(seconds: float) -> str:
    """Format milliseconds with two decimals, or with two significant digits if the time is below 0.1 ms.

    >>> _ms(0.0123), _ms(0.0000123)
    ('12.30', '0.012')
    """
    return f"{1e3 * seconds:.2f}" if seconds >= 1e-4 else f"{1e3 * seconds:.2g}"


def _speeds(step: dict[str, float], tokens: int) -> str:
    return f"{tokens / step['high_seconds']:.0f} to {tokens / step['low_seconds']:.0f}"


def _print_table(
    args: argparse.Namespace,
    drafter: Drafter,
    plan: Plan,
    attempts: Sequence[Attempt],
    drafts: Sequence[DraftEstimate],
    out: IO[str],
) -> None:
    from rich.table import Table

    from mars_jax.cli.generate.terminal import console

    def size(count: int) -> str:
        return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.2f} MiB"

    def memory(tried: Plan | Attempt) -> str:
        # For a program that does not fit, the compiler does not always report the required memory.
        if not tried.held_bytes:
            return "more than there is"
        return f"{size(tried.held_bytes)} of {size(tried.hbm_bytes)}"

    mesh = ",".join(f"{name}={size}" for name, size in plan.mesh.items())
    title = f"{args.target} with {args.draft} on {plan.topology}, {mesh}"
    title += f"; batch {args.batch}, context {args.context}, {args.dtype}, {_shape(drafter)}"
    table = Table(title=title, show_header=False)
    table.add_row("fits", "yes" if plan.fits else "no")
    table.add_row("memory of a device", memory(plan))
    table.add_row("  weights", size(plan.weight_bytes))
    table.add_row("  caches and state", size(plan.cache_bytes))
    table.add_row("read in a step, at least", size(plan.read_bytes))
    table.add_row("a step, at least", f"{_ms(plan.floor_seconds)} ms")
    table.add_row("  without a draft", f"{_ms(plan.autoregressive_floor_seconds)} ms")
    for row in _step_rows(plan, args.batch, drafter.max_depth):
        table.add_row(*row)
    table.add_row("compiled in", f"{plan.compile_seconds:.0f} s")
    for name, count in plan.collectives.items():
        table.add_row("collective", f"{count} x {name}")
    name = "draft with"
    for draft in drafts:
        times_text = f"{_ms(draft.low_seconds)} to {_ms(draft.high_seconds)} ms, pays above tau "
        times_text += f"{draft.pays_above[0]:.2f} to {draft.pays_above[1]:.2f}, {draft.gain:.2f} x at tau"
        table.add_row(name, f"{draft.flags} ({times_text} {draft.tau:.2f})")
        name = "  rather than"
    for note in plan.notes:
        table.add_row("note", note)
    for attempt in attempts:
        attempt_flags = f"--dtype {attempt.dtype}"
        if attempt.topology != plan.topology:
            attempt_flags = f"--topology {attempt.topology}"
        table.add_row("try" if attempt.fits else "fits neither", f"{attempt_flags} ({memory(attempt)})")
    console(out).print(table)
