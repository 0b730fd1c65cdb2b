"""`mars-jax calibrate`: choose a threshold, or a strict prefix, whose risk stays below a bound on held-out prompts."""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from mars_jax.cli.flags import add_flags, draft_or_default, number_parser
from mars_jax.cli.program import Parser, command
from mars_jax.cli.progress import progress
from mars_jax.cli.rule_flags import given_settings
from mars_jax.lab.commands import pair
from mars_jax.lab.provenance import provenance
from mars_jax.lab.theta import FORMAT, pair_fingerprints, run_settings, thetas_of
from mars_jax.utils.errors import MarsError
from mars_jax.utils.settings import Range, Setting
from mars_jax.utils.types import JsonObject
from mars_jax.utils.user_code import load_function
from mars_jax.utils.version import __version__
from mars_jax.verify import is_own, not_in, source_digest

_DESCRIPTION = """\
Choose theta from held-out prompts: the loosest threshold at which a risk stays below a
bound with a stated confidence (Learn then Test, arXiv 2110.01052), over the choice of the
prompts. The bound holds for prompts like these, with the same pair of models. With
--prefixes, choose the fewest strict first tokens at a fixed theta instead.
"""
_EPILOG = f"""\
examples:
  mars-jax calibrate --task arithmetic --chat --problems 500 --risk accuracy \\
      --bound 0.02 --output theta.json
  python -m mars_jax.generate --theta theta.json --chat "..."
  mars-jax calibrate --task jsonl=attacks.jsonl --chat \\
      --risk judges.py:is_safe --prefixes 16 8 4 2 1 0 --output prefix.json

{pair.TASKS}
A bound of 0.02 with confidence 0.95 needs 408 problems for a mean loss of 0.002, 816 for
0.005 and 2,448 for 0.01.

generate takes the file as --theta FILE, and benchmark among --thetas; they refuse it for
another pair, other weights, another rule or temperature. If no threshold is certified, it
holds inf, which is strict. During the run, answers are in OUTPUT-rows. After a kill, run the
same command again to continue.
"""
_SHARES = Range("a number between 0 and 1", 0, math.nextafter(1, 0), above=True)


def parser() -> Parser:
    """Build the argument parser of `mars-jax calibrate`."""
    command_parser = pair.make_parser(
        "calibrate", _DESCRIPTION, _EPILOG, arithmetic="enough for a loss of a tenth of the bound"
    )
    group = command_parser.add_argument_group("calibration")
    risk_help = (
        "average loss of a text due to the rule. regret: nats per token, clipped at 1; accuracy: loss of task score; "
        "FILE.py:NAME: loss of your own score, a function of prompt and answer that returns 0 to 1; the file is "
        "executed (default: %(default)s)"
    )
    add_flags(group, {"--risk RISK": risk_help}, default="regret")
    shares = {"--bound": (0.02, "bound of the risk"), "--confidence": (0.95, "confidence of the bound")}
    for flag, (default, help_text) in shares.items():
        parse_share = Setting(name=flag, kind=float, help="", ranges=_SHARES).from_text
        add_flags(
            group, {f"{flag} X": f"{help_text} (default: {default})"}, default=default, type=parse_share
        )
    values_flags = {
        "--thetas X": "thresholds to try, from strict to loose (default: a fixed grid)",
        "--prefixes N": "numbers of strict first tokens to try, in decreasing order, at a fixed --theta",
    }
    add_flags(group, values_flags, nargs="+")
    temperature_help = {"--temperature X": "0 is greedy (default: 0)"}
    add_flags(group, temperature_help, default=0.0, type=number_parser("temperature"))
    add_flags(command_parser.add_argument_group("output"), {"--output FILE": "a new file"}, type=Path)
    return command_parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, and check the flags and their combinations.

    Raises:
      MarsError: a flag is unknown, a value is out of range, or flags are incompatible.
      SystemExit: after --help and --version.
    """
    args = parser().parse_args(argv)
    args.draft = draft_or_default(args.draft, args.target)
    # --thetas lists the thresholds to try. With --prefixes, theta is instead an ordinary setting of the rule.
    replaced_settings = ("theta",)
    if args.prefixes is not None:
        replaced_settings = ()
        if setting := given_settings(args).get("exact_prefix"):
            raise MarsError(f"{setting.shown} does not apply with --prefixes: leave one of them out.")
    args.rule = pair.chosen_rule(args, instead=replaced_settings)
    args.judge = None
    if args.risk not in ("regret", "accuracy"):
        if not is_own(args.risk):
            raise MarsError(f"--risk is {args.risk}: expected regret, accuracy, or a judge as FILE.py:NAME.")
        # Raise an error now if the spec names no function.
        load_function(args.risk, "judge")
        args.risk, args.judge = "judge", args.risk
    if "theta" not in args.rule.options:
        raise MarsError(f"--verify {args.rule.name} has no theta to calibrate: choose a rule such as mars.")
    pair.check_pair_flags(args, args.rule, output="name a file for the threshold")
    args.temperature += 0.0  # 0 in place of -0
    args.theta_files, args.temperatures = [], [args.temperature]
    if args.prefixes is not None:
        args.setting, args.values = "exact_prefix", _prefixes(args)
    else:
        args.setting, args.values = "theta", _thetas(args)
        args.thetas = args.values
    if args.output.exists():
        raise MarsError(f"--output '{args.output}' exists already: name a new file.")
    if not args.output.parent.is_dir():
        raise MarsError(f"there is no directory '{args.output.parent}' for --output: make it first.")
    return args


def _prefixes(args: argparse.Namespace) -> list[int]:
    """Return the values of --prefixes."""
    if "exact_prefix" not in args.rule.options:
        raise MarsError(f"--prefixes does not apply to {not_in(args.rule, 'exact_prefix')}.")
    setting, structure = args.rule.setting("exact_prefix")
    prefixes = [setting.from_text(text, shown="--prefixes", **structure) for text in args.prefixes]
    if prefixes != sorted(set(prefixes), reverse=True):
        raise MarsError(
            "--prefixes are not in order: give each once, in decreasing order, such as 8 4 2 1 0."
        )
    return prefixes


def _thetas(args: argparse.Namespace) -> list[float]:
    """Return the thresholds to try, by default the rule's grid, which is fixed in advance as the test requires.

    They are ordered from strict to loose. For a user's rule, this can be ascending or descending order.
    """
    setting, structure = args.rule.setting("theta")
    rule_grid = setting.range(**structure).grid
    if args.thetas is None:
        if not rule_grid:
            raise MarsError(
                f"--verify {args.rule.name} has no thresholds of its own: give --thetas, from strict to loose."
            )
        return list(rule_grid)
    thetas, args.theta_files = thetas_of(args.rule, args.thetas, run_settings(args))
    valid_orders = {"rising": sorted(set(thetas)), "falling": sorted(set(thetas), reverse=True)}
    # The grid of a built-in rule runs from strict to loose, so --thetas must be in the order of the grid.
    if rule_grid and rule_grid[0] < rule_grid[-1]:
        del valid_orders["falling"]
    elif rule_grid:
        del valid_orders["rising"]
    if thetas not in valid_orders.values() or math.inf in thetas:
        expected_text = f"finite numbers from strict to loose, {' or '.join(valid_orders)}"
        if setting.by == "margin":
            expected_text += f" for the margin {structure['margin']}"
        raise MarsError(f"--thetas are not in order: give {expected_text}.")
    return thetas


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    return command(parse, _run, argv)


def _run(args: argparse.Namespace, out: IO[str]) -> None:
    from mars_jax.cli.open_target import joined_processes

    with joined_processes(args, (), out) as stream:
        _study(args, stream)


def _study(args: argparse.Namespace, out: IO[str]) -> None:
    from mars_jax.lab import calibration
    from mars_jax.lab.folder import check_writable, open_rows, write_shared_json
    from mars_jax.serve.rows import digest
    from mars_jax.utils import hosts
    from mars_jax.verify import load

    if hosts.is_first():
        check_writable(args.output)
    # The --output file is created only at the end, so store the rows in a folder next to it until then.
    rows_folder = args.output.with_name(f"{args.output.name}-rows")
    # By default, use enough problems to certify the bound if the mean loss is a tenth of the bound.
    default_problems = calibration.FACTORS[0.1] * calibration.fewest(args.bound, args.confidence)
    check_problems = functools.partial(calibration.check_certifiable, args)
    problems, target, drafter = pair.open_study(
        args, rows_folder, check_problems, arithmetic=default_problems
    )
    study = pair.make_study(args, target, problems, ("setting", "values", "dtype", "mesh"))
    promise = {name: getattr(args, name) for name in ("risk", "bound", "confidence")}
    promise["meaning"] = calibration.RISKS[args.risk]
    judge, judge_source = None, None
    if args.judge is not None:
        promise["judge"] = args.judge
        judge, judge_source = load_function(args.judge, "judge"), source_digest(args.judge)
    # These settings are also written to the output file.
    study_settings = {
        "settings": run_settings(args, temperature=args.temperature),
        "promise": promise,
        "tasks": args.task,
        "problems": len(problems),
        "problems_digest": digest(repr(problems).encode()),
        "chat": args.chat,
        "max_new_tokens": args.max_new_tokens,
        "seed": args.seed,
        "version": __version__,
    }
    # All settings that determine the rows. A run can continue only with the same settings.
    row_settings = study.settings(drafter.params) | study_settings | {"judge_source": judge_source}
    with contextlib.closing(open_rows(rows_folder, row_settings)) as rows, progress("answers") as show:
        decoding = study.decoding(drafter)
        calibrated = calibration.calibrate(args, decoding, problems, rows, judge=judge, progress=show)
        report = study_settings | _rule_and_theta(args, calibrated["value"])
        loaded_rule = load(args.rule.spec, target, **args.rule.settings)
        report["weights"] = pair_fingerprints(target, drafter, loaded_rule)
        report |= {name: calibrated[name] for name in ("tau", "strict_tau")}
        report["trials"] = [{args.setting: trial.pop("value"), **trial} for trial in calibrated["trials"]]
        report["made"] = provenance()
        write_shared_json(args.output, report)
        if hosts.is_first():
            # The output file contains all results.
            shutil.rmtree(rows_folder)
    print(_table(report, calibrated["value"], args), file=out)


def _rule_and_theta(args: argparse.Namespace, value: float) -> JsonObject:
    """Return the format, theta and rule for the output file. `value` is inf (strict) if no value was certified."""
    rule_json, theta = args.rule.as_json(but=("theta",)), value
    if theta == math.inf:
        # JSON has no infinities.
        theta = "inf"
    elif args.setting == "exact_prefix":
        rule_json["settings"]["exact_prefix"], theta = value, args.rule.as_json()["settings"]["theta"]
    return {"format": FORMAT, "theta": theta, "rule": rule_json}


def _table(report: JsonObject, value: float, args: argparse.Namespace) -> str:
    from mars_jax.lab.calibration import FACTORS, fewest

    risk_units = {"regret": "nats per token", "accuracy": "of the score", "judge": "of the judge's number"}
    setting_word = {"theta": "theta", "exact_prefix": "prefix"}[args.setting]
    table_lines = [f"{setting_word:>8} {'risk':>9} {'p-value':>9} {'tau':>6}"]
    for trial in report["trials"]:
        verdict = "certified" if trial["passed"] else "not certified"
        table_lines.append(
            f"{trial[args.setting]:>8g} {trial['risk']:>9.5f} {trial['p_value']:>9.2g} {trial['tau']:>6.2f}  {verdict}"
        )
    promise = f"{args.risk} below {args.bound:g} {risk_units[args.risk]} with confidence {args.confidence:g}"
    if value == math.inf:
        table_lines.append(f"no {setting_word} is certified for {promise}: the file has inf, which is strict")
        # Testing stops at the first value that fails, which in this case was the strictest one.
        strictest_risk = report["trials"][0]["risk"]
        if factors := [factor for share, factor in FACTORS.items() if strictest_risk / args.bound <= share]:
            needed_problems = factors[0] * fewest(args.bound, args.confidence)
            table_lines.append(f"a risk of {strictest_risk:.2g} takes about {needed_problems:,} problems")
    else:
        taus_text = f"tau {report['tau']:.2f}, strict {report['strict_tau']:.2f}"
        table_lines.append(f"{setting_word} {value:g}: {promise}; {taus_text}")
    return "\n".join(table_lines)
