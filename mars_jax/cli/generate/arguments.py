"""Flags of `python -m mars_jax.generate`."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from mars_jax.cli import flags
from mars_jax.cli.flags import add_flags, add_settings
from mars_jax.cli.generate.prompts import logit_bias_of
from mars_jax.cli.program import Parser
from mars_jax.cli.rule_flags import OWN, add_rule_flags, given_settings, rule_and_file
from mars_jax.drafters.registry import draft_words, drafters_that
from mars_jax.drafters.tree_shapes import Dynamic, parse_tree
from mars_jax.utils import assets
from mars_jax.utils.errors import MarsError
from mars_jax.utils.settings import DTYPES, REQUEST
from mars_jax.utils.types import JsonObject

_DESCRIPTION = """\
Continue prompts by speculative decoding: a cheap draft proposes tokens, the
target model scores them in one forward pass, and a rule decides how many of
them to keep.
"""
_EPILOG = """\
examples:
  mars-jax generate "Once upon a time"
  mars-jax generate --target PATH --draft eagle:HEAD --chat
  mars-jax generate --target PATH --prompts-file in.jsonl --output out.jsonl

Text goes to stdout, statistics and progress to stderr; bad input ends with exit code 2.
"""
_ROWS = textwrap.fill(
    "A prompts file has one prompt per line. A *.jsonl file has one object per line, and a *.parquet file has the keys "
    "of such objects as columns. From a dataset of the hub, OWNER/NAME[:CONFIG[:SPLIT]], only prompts and ids are "
    "read. The keys are prompt, messages (a conversation) or prompt_tokens, and optionally, for this prompt only, id, "
    + ", ".join(REQUEST)
    + ", stop_strings, logit_bias, regex, json_schema, choice, allowed_tokens, relax_in, strict_in, and settings of "
    "the rule, such as theta.",
    width=76,
)
_OWN = textwrap.fill(
    f"A rule of your own, {OWN}, is a function that returns a rule, and its arguments are the settings; naming it "
    "runs its file.",
    width=76,
)
_SHORT = (
    *("target", "draft", "num_draft_tokens", "tree", "dtype"),
    *("verify", "theta", "list_rules", "list_drafters"),
    *("temperature", "top_k", "top_p", "seed", "max_new_tokens", "stop_strings"),
    *("prompts", "prompts_file", "chat", "system", "batch_size"),
    *("stream", "json", "output", "resume", "compare"),
)
"""Flags that `--help` shows; `--help-all` shows all flags."""


def parser() -> Parser:
    """Return the parser. All flags default to None, so that flags that were not given can be recognised."""
    command_parser = Parser(
        prog="python -m mars_jax.generate",
        usage="%(prog)s [flags] [PROMPT ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        short=_SHORT,
    )
    _add_models(command_parser)
    _add_rule(command_parser)
    _add_sampling(command_parser)
    _add_text(command_parser)
    _add_input(command_parser)
    _add_output(command_parser)
    flags.add_target_flags(command_parser.add_argument_group("machine"))
    flags.add_host_flags(command_parser)
    return command_parser


def _add_models(command_parser: Parser) -> None:
    group = command_parser.add_argument_group("models")
    add_flags(
        group,
        {
            "--target PATH": "directory, GGUF file, owner/name on Hugging Face, or a name from mars-jax models "
            "(default: tiny/target)",
            "--draft DRAFT": f"{draft_words()} (default: the best draft that needs no download, else ngram); "
            "--list-drafters explains them",
        },
    )
    add_settings(group, "num_draft_tokens")
    add_flags(group, {"--tree 4-2-2-1": _tree_help()}, type=parse_tree)
    dtype_help = (
        "dtype of the weights (default: the checkpoint's); a head uses the target's; int8: matrices in 8 bits per "
        "weight, the rest as stored; int4: matrices of layers in 4 bits, others in 8. On a CPU, 4-bit matrices are "
        "dequantised while loading if memory allows it"
    )
    group.add_argument("--dtype", choices=DTYPES, help=dtype_help)
    add_settings(group, "draft_stop")
    flags.add_draft_flags(group)
    device_help = (
        "draft with model:PATH on this device, or on several, while the target verifies on others; each draft assumes "
        "that the previous one is accepted, which changes no token (default: on the target's device, in alternation)"
    )
    add_flags(group, {"--draft-device N[,N...]": device_help}, type=_devices)
    refine_help = (
        "let the draft, a model or an EAGLE-3 head, learn from its failures as it decodes, under lossless rules; FILE "
        "holds texts, separated by <|endoftext|>, on which quality must not drop: an update is reverted if tau on the "
        "held-out part falls 3%% below its initial value"
    )
    add_flags(group, {"--refine FILE": refine_help})
    add_settings(group, "refine_every")


def _tree_help() -> str:
    default_tree = Dynamic()
    tree_sizes = f"{default_tree.top_k}-{default_tree.depth}-{default_tree.nodes}"
    return (
        "children per node at each depth of a draft tree, or dynamic (default for eagle and dflash); dynamic "
        f"follows the draft's confidence; with {drafters_that('trees')}; dynamic:8-6-40 sets "
        f"children, depth and nodes (default: dynamic:{tree_sizes}, for dflash as deep as its block), with "
        f"{drafters_that('dynamic')}. EAGLE's own depth does not count the first level: "
        "its depth=7 is dynamic:10-8-60"
    )


def _add_rule(command_parser: Parser) -> None:
    group = command_parser.add_argument_group("rule", description=_OWN)
    add_rule_flags(
        group, default="exact, or mars with --compare, a rule setting, or neither --target nor --draft"
    )
    listings = {
        "--list-rules": "print the table of rules, and nothing else",
        "--list-drafters": "print the table of drafters, and nothing else",
    }
    add_flags(group.add_mutually_exclusive_group(), listings)


def _add_sampling(command_parser: Parser) -> None:
    group = command_parser.add_argument_group("sampling")
    add_settings(group, *flags.SAMPLING)
    bias_help = "add X to the logit of a token id, -inf to ban it; may be given several times"
    add_flags(group, {"--logit-bias TOKEN=X ...": bias_help})
    add_settings(group, "samples")
    add_flags(group, {"--ignore-eos": "decode past the model's stop tokens"})
    stop_help = "end a completion before TEXT; may be given several times"
    add_flags(group, {"--stop-string TEXT ...": stop_help}, dest="stop_strings")


def _add_text(command_parser: Parser) -> None:
    group = command_parser.add_argument_group("text", description="Constraints on texts.")
    constraint_flags = {
        "--regex PATTERN": "constrain the text to match the whole pattern",
        "--json-schema FILE": "constrain the text to JSON of this schema, formatted as by Python's json.dumps",
        "--choice TEXT ...": "constrain the text to one of these; may be given several times",
    }
    add_flags(group.add_mutually_exclusive_group(), constraint_flags)
    relax_flags = {
        "--relax-constrained": "let a lossy rule relax in constrained text, which stays valid (default: it does not)",
        "--relax-in SPAN ...": "let a lossy rule relax in this span only: think, code, tool, json, or OPEN...CLOSE; "
        "may be given several times",
        "--strict-in SPAN ...": "let a lossy rule relax nothing in this span",
    }
    add_flags(group, relax_flags)


def _add_input(command_parser: Parser) -> None:
    group = command_parser.add_argument_group("input", description=_ROWS)
    group.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="texts to continue (default: ask on a terminal)"
    )
    input_flags = {
        "--prompts-file FILE": "read prompts from a file, or - for stdin; also a URL such as gs://..., or a dataset of "
        "the hub",
        "--chat": "format prompts with the model's chat template; on a terminal, lines are then turns of one "
        "conversation",
        "--system TEXT": "content of the system turn; needs a chat template",
    }
    add_flags(group, input_flags)
    template_help = "a variable of the chat template, as JSON or a string, such as enable_thinking=false"
    add_flags(group, {"--template-arg NAME=VALUE ...": template_help}, dest="template_args")
    add_settings(group, "batch_size")


def _add_output(command_parser: Parser) -> None:
    group = command_parser.add_argument_group("output")
    group.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="print text as it is decoded (default), or when done",
    )
    log_probs_help = (
        "with --json or --output: add three log-probabilities, the regret and the kind of every token"
    )
    add_flags(group, {"--log-probs": log_probs_help})
    add_settings(group, "top_log_probs")
    add_flags(group, {"--json": "print one JSON object per prompt; with --list-rules the table"})
    add_flags(group, {"--output FILE": "append these objects to a new file, one by one"}, type=Path)
    add_flags(group, {"--resume": "continue the --output of an interrupted run"})
    add_flags(group, {"--part I/N": flags.PART_HELP}, type=flags.part_of)
    compare_help = "compare no draft, exact and the rule; print a table of speed and acceptance"
    add_flags(group, {"--compare": compare_help})


def _devices(text: str) -> tuple[int, ...]:
    """Parse device numbers from N,N,..."""
    if re.fullmatch(r"\d{1,6}(,\d{1,6})*", text, re.ASCII) is None:
        raise MarsError(f"--draft-device is {text!r}: expected one device number or several, as in 4,5,6,7.")
    return tuple(int(number) for number in text.split(","))


def _check_constraints(args: argparse.Namespace) -> None:
    """Check constraints and spans before a model is loaded. Replace the path of a JSON schema with the schema."""
    from mars_jax import constraints
    from mars_jax.constraints.spans import checked_spans

    # This call only checks for errors. The constraints themselves are built together with the requests.
    constraints.from_fields({"regex": args.regex, "choice": args.choice})
    if args.json_schema is not None:
        # The settings of a run then record the schema itself, not the path of a file that may change.
        args.json_schema = json.loads(constraints.json_schema(Path(args.json_schema)).content)
    for spans in (args.relax_in, args.strict_in):
        checked_spans(spans or ())


def _template_args(texts: Sequence[str]) -> JsonObject:
    """Parse NAME=VALUE strings into a dict. Values that are not JSON stay strings."""
    args_by_name = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise MarsError(f"--template-arg is {text!r}: expected NAME=VALUE, as in enable_thinking=false.")
        try:
            args_by_name[name] = json.loads(value)
        except ValueError:
            args_by_name[name] = value
        except RecursionError:
            raise MarsError(f"--template-arg {name} is nested too deeply: give a flatter value.") from None
    return args_by_name


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed flags, with the chosen rule as `rule`. `check_flags` checks their combinations.

    Raises:
      MarsError: a flag is unknown, or a value is invalid.
      SystemExit: after --help and --version.
    """
    args = parser().parse_args(argv)
    if args.logit_bias is not None:
        bias_parts = (text.partition("=") for text in args.logit_bias)
        args.logit_bias = logit_bias_of({token: value for token, _, value in bias_parts})
    args.template_args = _template_args(args.template_args or []) or None
    _check_constraints(args)
    # Without a draft, the default rule is exact. With a draft, it is mars if the pair is the embedded one, --compare is
    # set or a rule setting is given, and exact otherwise.
    is_embedded_pair = args.target is None and args.draft is None
    args.target = args.target or assets.TARGET
    # A default draft may adapt its length on a CPU (see `check_flags`), except for the embedded pair.
    args.draft_is_default = args.draft is None and not is_embedded_pair
    args.draft = flags.draft_or_default(args.draft, args.target)
    rule_settings = given_settings(args)
    default_rule = "exact"
    if (is_embedded_pair or rule_settings or args.compare) and args.draft != "none":
        default_rule = "mars"
    args.rule, args.theta_file = rule_and_file(args.verify, rule_settings, default_rule)
    return args
