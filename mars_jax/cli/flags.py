"""Flags that several commands share, parsers of their values, and checks of their combinations."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mars_jax.drafters.registry import HEAD_EMBED, DraftSpec, drafters_that
from mars_jax.utils import assets
from mars_jax.utils.catalogue import default_draft
from mars_jax.utils.errors import MarsError
from mars_jax.utils.settings import ATTENTION, BATCH, REQUEST, STORED_DTYPES
from mars_jax.verify import RuleChoice

if TYPE_CHECKING:
    from mars_jax.cli.generate.prompts import PromptRow

SAMPLING = tuple(name for name in REQUEST if name not in ("strict", "draft_stop"))
"""Settings of a request that concern neither the rule nor the draft."""


def flag_of(name: str) -> str:
    """Return the flag that corresponds to a Python name.

    >>> flag_of("top_k")
    '--top-k'
    """
    return "--" + name.replace("_", "-")


def without(argv: Sequence[str], flags: Collection[str]) -> list[str]:
    """Return a command line without some flags and their values.

    >>> without(["--tune", "3", "5", "--problems", "4", "--output=b"], ["--tune", "--output"])
    ['--problems', '4']
    """
    remaining_words, skips_word = [], False
    for word in argv:
        # All words up to the next flag are values of the current flag, so their number need not be known.
        if word.startswith("--"):
            skips_word = word.partition("=")[0] in flags
        if not skips_word:
            remaining_words.append(word)
    return remaining_words


def add_flags(group: argparse._ActionsContainer, helps: Mapping[str, str], **options: Any) -> None:
    """Add several flags that have the same argparse options.

    Args:
      group: a parser, or one of its groups.
      helps: help texts, keyed by flag: "--flag" for a switch, "--flag X" for a flag with a value, and "--flag X ..."
        for a flag that may be given several times.
      options: additional options for `add_argument`.
    """
    for form, help_text in helps.items():
        flag, _, value_name = form.partition(" ")
        if not value_name:
            group.add_argument(flag, action="store_true", help=help_text, **options)
            continue
        action = "append" if value_name.endswith(" ...") else "store"
        value_name = value_name.removesuffix(" ...")
        group.add_argument(flag, action=action, metavar=value_name, help=help_text, **options)


def add_settings(group: argparse._ActionsContainer, *names: str) -> None:
    """Add flags for settings of a request or a batch."""
    for name in names:
        setting = (REQUEST | BATCH)[name]
        group.add_argument(
            flag_of(name), metavar=setting.metavar, type=number_parser(name), help=setting.help
        )


def number_parser(name: str, shown: str | None = None) -> Callable[[str], Any]:
    """Return an argparse type that parses a number and checks that it is in the range of the setting `name`.

    The type raises MarsError if its argument is not a number or is out of range.

    >>> number_parser("temperature")("0.5")
    0.5
    """
    return functools.partial((REQUEST | BATCH)[name].from_text, shown=shown or flag_of(name))


def draft_or_default(draft: str | None, target: str) -> str:
    """Return the given draft, or else the best draft for the target on this machine, or else n-grams.

    >>> draft_or_default(None, "owner/model")
    'ngram'
    """
    return draft or default_draft(target, lambda name: name in assets.NAMES or _is_here(name))


def _is_here(name: str) -> bool:
    from mars_jax.hub.files import is_here  # imports jax, which embedded models do not need here

    return is_here(name)


def add_draft_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags for a head's embedding, an adaptive draft length, and lossy rules with adaptive drafts."""
    embed_help = (
        f"embedding that a head uses, with {drafters_that('embeds')} (default: own, if its checkpoint has one); "
        "target: share the target's"
    )
    group.add_argument("--head-embed", choices=HEAD_EMBED, help=embed_help)
    size_help = (
        "auto: each step drafts the whole chain, half of it or nothing, depending on the cost of a step and recent "
        f"acceptance; with {drafters_that('resizes')} and lossless rules (default: fixed)"
    )
    group.add_argument("--draft-size", choices=["fixed", "auto"], help=size_help)
    rule_help = (
        "allow lossy rules with --draft-size auto and with drafts that learn, although a completion then depends on "
        "other requests"
    )
    add_flags(group, {"--any-rule": rule_help}, default=None)


def add_target_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags for the target's attention, KV cache, prefill and mesh."""
    attention_help = (
        "implementation of the target's attention (default: auto); pallas: on TPU a kernel that reads only the slots "
        "in use, which no chip has run yet, and xla elsewhere; auto: that kernel for large batches or buffers, if it "
        "compiles"
    )
    group.add_argument("--attention", choices=ATTENTION, help=attention_help)
    cache_help = (
        "dtype of the target's KV cache (default: dtype of the weights, or float32 on a CPU); int8: 8 bits per number, "
        "and a scale for each token and head"
    )
    group.add_argument("--cache-dtype", choices=STORED_DTYPES, help=cache_help)
    add_flags(group, {"--no-check": "do not verify the checksums of a --target that mars-jax convert wrote"})
    add_settings(group, "prefill_chunk")
    mesh_help = (
        "divide the work over devices: data (rows of the batch), model (heads, hidden units and vocabulary) and "
        "expert, as in data=2,model=4 (default: one device)"
    )
    add_flags(group, {"--mesh data=2,model=4": mesh_help})


PART_HELP = "decode only rows I, I + N, I + 2N ... with the ids and seeds that they have in the whole run"


def part_of(text: str) -> slice:
    """Return the slice that selects the rows of one part of a run.

    Args:
      text: value of --part: I/N, with I from 0 to N - 1.

    Raises:
      MarsError: the text does not have this form.

    >>> list(range(7))[part_of("1/3")]
    [1, 4]
    """
    match = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text, re.ASCII)
    if match is None or int(match[1]) >= int(match[2]):
        raise MarsError(f"--part is {text!r}: expected I/N, such as 0/4, with I from 0 to N - 1.")
    return slice(int(match[1]), None, int(match[2]))


HOSTS = ("coordinator", "num_processes", "process_id")
"""Names of the arguments that `add_host_flags` adds."""


def add_host_flags(parser: argparse.ArgumentParser) -> None:
    """Add to a parser the flags for runs with several processes."""
    group = parser.add_argument_group(
        "hosts", description="Several processes, with --mesh; on Cloud TPU and Slurm they find each other."
    )
    add_flags(group, {"--coordinator HOST:PORT": "address at which process 0 listens"})
    number_flags = {
        "--num-processes N": "number of processes, all with the same flags; 1: do not look for others",
        "--process-id I": "number of this process; process 0 prints and writes",
    }
    add_flags(group, number_flags, type=int)


WITHOUT = [
    (["--coordinator", "--num-processes", "--process-id"], ["--mesh"], ", which divides their work"),
    (["--any-rule"], ["--draft-size auto", "--refine"], ", as no text depends on drafts of a fixed size"),
    (["--refine-every"], ["--refine"], ""),
    (["--relax-constrained"], ["--regex", "--json-schema", "--choice", "allowed_tokens"], ""),
    (["--system", "--template-arg"], ["--chat", "messages"], ", which have a chat template"),
    (["--resume"], ["--output"], ", the file that it continues"),
    (["--part"], ["--output"], ", the file of its rows"),
    (["--log-probs", "--top-log-probs"], ["--json", "--output"], ", whose rows it adds to"),
    (["--draft-cost"], ["--tune"], ""),
]
"""Rows of (flags, required flags, note): the flags have no effect unless one of the required flags is given too."""
WITH = [
    (["--base", "--block"], ["--compare"], ", which chooses its own rules"),
    (["--output", "--resume", "--stream", "--no-stream"], ["--compare"], ", which prints one table"),
    (["--num-draft-tokens", "--draft-size auto"], ["--tree"], ", which sets the shape"),
    (["--refine"], ["--mesh", "--compare", "--stream"], ""),
    (["--refine"], ["--resume"], ", because the trained draft was not saved"),
    (["--refine"], ["--part"], ", as every part would learn for itself"),
    (["--draft-device"], ["--tree"], ", because only a chain can be assumed to be accepted"),
    (["--draft-device"], ["--compare", "--draft-size auto", "--refine"], ""),
    (["--draft-device"], ["--coordinator", "--num-processes"], ", as one process must own the devices"),
    (["--stream"], ["--json"], ", which prints only finished rows"),
    (["--stream"], ["--output"], ", which stores only finished rows"),
    (["prompt_tokens"], ["--chat"], ", which tokenizes text"),
    (["--part"], ["--tune"], ", which chooses lengths on the problems of all parts"),
    (
        ["--num-draft-tokens", "--draft-size auto", "--tree", "--any-rule"],
        ["--tune"],
        ", which drafts chains of several lengths",
    ),
    (["--controls", "--refine"], ["--tune"], ", which chooses its own arms"),
    (["--thetas"], ["--prefixes"], ", at one theta"),
]
"""Rows of (flags or prompt keys, conflicting flags, note): the flags or keys cannot be combined with any of the
conflicting flags."""
OF_DRAFT = [
    (["--tree"], "trees", "drafts no trees"),
    (["--draft-stop", "draft_stop"], "stops", "has no entropy to stop by"),
    (["--draft-size auto", "--tune"], "resizes", "has no chains of several lengths"),
    (["--head-embed"], "embeds", "has no embedding in its checkpoint"),
    (["--refine"], "learns", "does not learn from its failures"),
]
"""Rows of (flags or keys, property, reason): only drafters with the property support them, for the reason given."""


class Present:
    """The flags and prompt keys that a user has set.

    Each flag is stored as a key, as a flag, and as a flag with its value: `top_k`, `--top-k` and `--top-k 5`.
    """

    def __init__(self, args: argparse.Namespace, rows: Sequence[PromptRow] = ()):
        """
        Args:
          args: parsed arguments of any command; flags that the command does not have count as not set.
          rows: rows of the prompts file, whose keys count as set too.
        """
        self._args, self._rows = args, rows
        self._flags = {"--no-stream"} if getattr(args, "stream", None) is False else set()
        for name, value in vars(args).items():
            if _holds(value):
                # A flag that may be given several times, such as --stop-string, is stored under a plural name.
                flag = flag_of(name)
                self._flags |= {name, flag, flag.removesuffix("s"), f"{flag} {value}"}

    def __contains__(self, name: str) -> bool:
        key = name.removeprefix("--").replace("-", "_")
        return name in self._flags or any(_holds(row.given.get(key)) for row in self._rows)

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Raise MarsError for the first of these names that is set. Ignoring it silently would give wrong results.

        Args:
          names: flags, which begin with "--", and keys of the prompts file.
          why: the reason and the fix, which follow "does not apply" in the message.
        """
        for name in names:
            sentence = f"{name} does not apply {why}."
            # A name that begins with dashes is a flag. Any other name is a key in the rows of the prompts file.
            if name.startswith("--"):
                if name in self._flags:
                    raise MarsError(sentence)
                continue
            for row in self._rows:
                if _holds(row.given.get(name)):
                    raise row.error(sentence)

    def refuse_alone(self) -> None:
        """Raise MarsError for combinations of flags that the tables `WITH` and `WITHOUT` exclude."""
        for names, other_flags, explanation in WITH:
            for flag in filter(self.__contains__, other_flags):
                self.refuse(names, f"with {flag}{explanation}: leave one of them out")
        for names, needed_flags, explanation in WITHOUT:
            if any(flag in self for flag in needed_flags):
                continue
            alternatives, cure = needed_flags[-1], "it"
            if len(needed_flags) > 1:
                alternatives, cure = f"{', '.join(needed_flags[:-1])} or {needed_flags[-1]}", "one of them"
            self.refuse(names, f"without {alternatives}{explanation}: add {cure}, or leave this out")

    def refuse_for(self, draft: DraftSpec, rule: RuleChoice) -> None:
        """Raise MarsError if the drafter or the rule does not support one of the flags that are set."""
        for names, trait, lack_reason in OF_DRAFT:
            if not getattr(draft.definition, trait):
                cure = f"leave it out, or draft with {drafters_that(trait)}"
                self.refuse(names, f"to --draft {draft.kind}, which {lack_reason}: {cure}")
        tree = self._args.tree
        # A static tree is a tuple of the numbers of children per node at each depth. If all of them are 1, the tree is
        # a chain.
        is_dynamic = tree is not None and not isinstance(tree, tuple)
        if is_dynamic and not draft.definition.dynamic:
            cure = "give the children per node at each depth, such as 4-2-2-1"
            raise MarsError(f"--tree dynamic does not apply to --draft {draft.definition.spec}: {cure}.")
        if "chain" in rule.needs and (is_dynamic or max(tree or [1]) > 1):
            block_note = " by blocks" if rule.settings.get("block") else ""
            cure = "use exact or rejection, or mars over either"
            self.refuse(["--tree"], f"to the rule {rule.name}{block_note}, which verifies chains: {cure}")
        if rule.definition.lossless:
            self.refuse(["--any-rule"], f"to the rule {rule.name}, which is lossless: leave it out")
        elif "--any-rule" not in self:
            lossy_reason = "which is lossy, so that a completion would depend on other requests"
            cure = "add --verify exact or rejection, or --any-rule"
            self.refuse(["--draft-size auto"], f"to the rule {rule.name}, {lossy_reason}: {cure}")


def _holds(value: object) -> bool:
    """Return whether a flag or a key is set. A value of 0 counts as set."""
    return value is not None and value is not False and value != []
