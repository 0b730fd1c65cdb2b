"""Interactive mode of `generate`, which reads lines from a terminal and streams an answer to each.

With --chat, the lines are turns of one conversation; otherwise each line is a separate prompt. A single running row
decodes all of them (`serve.chat.Running`), so that only the new tokens of a line are prefilled.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import readline
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import IO

import jax

from mars_jax.cli import signals
from mars_jax.cli.flags import SAMPLING, flag_of, without
from mars_jax.cli.generate.applies import Choices, check_flags, check_interactive_flags
from mars_jax.cli.generate.arguments import parse
from mars_jax.cli.generate.job import Job, load_rule, make_job_requests, open_job
from mars_jax.cli.generate.prompts import PromptRow
from mars_jax.cli.generate.terminal import TextPrinter, console, legend, line_of
from mars_jax.cli.open_target import joined_processes
from mars_jax.cli.program import keep_compilations
from mars_jax.cli.progress import busy
from mars_jax.cli.rule_flags import FLAGS as RULE_FLAGS
from mars_jax.drafters.registry import definitions
from mars_jax.hub.pretrained import Turn
from mars_jax.serve.chat import Chat, Running
from mars_jax.serve.queue import Finished, Said
from mars_jax.serve.requests import Request
from mars_jax.serve.session import check_finite
from mars_jax.utils import paths
from mars_jax.utils.errors import MarsError, did_you_mean
from mars_jax.verify import rules

PROMPT = "> "
HISTORY_LINES = 1000
COMMANDS = {
    "/help": "list the commands",
    "/new": "begin a new conversation",
    "/undo": "remove the last turn",
    "/again": "answer the last prompt again, for example after /set",
    "/settings": "show the settings",
    "/set": "NAME VALUE: change a setting, as in /set temperature 0.7",
    "/rule": "NAME [FLAGS]: verify with another rule, as in /rule mars --theta 0.8",
    "/draft": "SPEC [FLAGS]: draft with another drafter, as in /draft ngram",
    "/quit": "quit, like Ctrl-D; Ctrl-C stops an answer",
}
_CHOSEN = {
    "/rule": (*map(flag_of, RULE_FLAGS), "--rule-option"),
    "/draft": (
        *("--draft", "--tree", "--num-draft-tokens", "--draft-stop", "--draft-size", "--any-rule"),
        "--head-embed",
    ),
}
"""Flags that each interactive command replaces. The command's NAME becomes the value of the first flag."""
_ROW = [PromptRow(where="", prompt="Once upon a time")]
"""Placeholder row, for compiling and for checking flags before the first prompt."""


def talk(argv: Sequence[str], args: argparse.Namespace, out: IO[str]) -> None:
    """Answer lines until the input ends.

    Args:
      argv: the command line, to which /set adds flags.
      args: the parsed flags.
      out: the terminal.

    Raises:
      MarsError: see `open_job`.
    """
    choices = check_flags(args, _ROW)
    keep_compilations()
    with joined_processes(args, _ROW, out):
        # On a cluster, JAX may have found other processes even without flags for hosts.
        if jax.process_count() > 1:
            raise MarsError("one process answers on a terminal, and this run has several: give prompts.")
        with busy("loading"):
            job = open_job(args, choices, _ROW)
        talk_session = Talk(list(argv), args, job, out)
        talk_session.compile()
        talk_session.greet()
        with editing(out, list(COMMANDS)) as ask:
            while talk_session.takes(ask):
                pass


def history_file() -> Path | None:
    """Return the path of the history, in the user's state folder; None for a user without a home folder.

    >>> history_file().parts[-2:]
    ('mars_jax', 'history')
    """
    state_folder = paths.kept("XDG_STATE_HOME", ".local", "state")
    return state_folder and state_folder / "mars_jax" / "history"


@contextlib.contextmanager
def editing(out: IO[str], words: Sequence[str]) -> Iterator[Callable[[str], str]]:
    """Yield a function that shows a prompt and returns the user's line; it raises `EOFError` at the end of input.

    Only the user can read the history file. If the file cannot be written, the history lasts only for the session.

    Args:
      out: the terminal.
      words: completions that the tab key offers at the beginning of a line.
    """
    # By default a slash is a delimiter, and completing /s would insert /set after the slash.
    readline.set_completer_delims(" \t\n")
    readline.set_completer(lambda text, state: _completion(readline.get_line_buffer(), words, state))
    readline.parse_and_bind("tab: complete")
    readline.set_history_length(HISTORY_LINES)
    # Drop lines from an earlier session, because the history is global to the process.
    readline.clear_history()
    history_path = history_file() or Path(os.devnull)
    with contextlib.suppress(OSError):
        history_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        history_path.touch(mode=0o600)
        readline.read_history_file(history_path)

    def ask(prompt: str) -> str:
        # `input` supports line editing only if `sys.stdout` is the terminal, but commands redirect stdout to stderr.
        with contextlib.redirect_stdout(out):
            line = input(prompt)
        if line.strip():
            with contextlib.suppress(OSError):
                # Append only the new line, because several sessions may share the file.
                readline.append_history_file(1, history_path)
        return line

    try:
        yield ask
    finally:
        readline.set_completer(None)


def _completion(line: str, words: Sequence[str], state: int) -> str | None:
    """Return the entry at index `state` among the words that start with `line`; None past the last one.

    >>> _completion("/s", ["/new", "/set", "/settings"], 1)
    '/settings'
    """
    if not line.startswith("/"):
        return None
    matching_words = [word for word in words if word.startswith(line)]
    return next(iter(matching_words[state:]), None)


class Talk:
    """One interactive session."""

    def __init__(self, argv: list[str], args: argparse.Namespace, job: Job, out: IO[str]):
        if (reconfigure := getattr(out, "reconfigure", None)) is not None:
            reconfigure(errors="replace")  # a character that the encoding lacks must not interrupt an answer
        self._argv, self._args, self._job = argv, args, job
        self._out, self._screen = console(out), console(sys.stderr)
        self._running = Running(job.session)
        self._chat = Chat.over(self._running, self._turns_request) if args.chat else None
        self._last: str | None = None  # the last prompt
        self._count = 0  # number of answers

    def compile(self) -> None:
        """Compile a decoding step before the first answer."""
        with busy("compiling"):
            self._running.compile(self._job.requests[0])

    def _pair(self) -> str:
        return f"{self._args.target}, {self._args.draft}, rule {self._job.session.rule_name}"

    def greet(self) -> None:
        """Print the pair, and the key that ends the session."""
        self._tell(f"{self._pair()}; /help lists commands, Ctrl-D leaves", "dim")
        self._legend()

    def _legend(self) -> None:
        if self._job.drafts and self._screen.color_system is not None:
            self._screen.print(legend(self._screen.width, trusts=self._job.trusts))

    def _tell(self, sentence: str, style: str = "") -> None:
        """Print a sentence on stderr, with line breaks only between words."""
        self._screen.print(sentence, style=style, soft_wrap=False)

    def takes(self, ask: Callable[[str], str]) -> bool:
        """Read one line and answer it. Return False to end the session."""
        try:
            with signals.raising():
                line = ask(PROMPT)
        except EOFError:
            self._out.file.write("\n")
            return False
        except KeyboardInterrupt:  # drop the line, as shells do
            self._out.file.write("\n")
            return True
        if not line.strip():
            return True
        try:
            if line.startswith("/"):
                return self._command(line)
            self._answer(line)
        except MarsError as error:
            self._tell(f"error: {' '.join(str(error).split())}", "red")
        return True

    def _command(self, line: str) -> bool:
        name, *words = line.split()
        if name not in COMMANDS:
            suggestion = did_you_mean(name, COMMANDS)
            raise MarsError(
                f"there is no command {name}{suggestion}: /help lists them. If it is a prompt, put a space before it."
            )
        if words and name not in ("/set", *_CHOSEN):
            raise MarsError(f"{name} takes no arguments: leave {' '.join(words)!r} out.")
        if name == "/help":
            for command, summary in COMMANDS.items():
                self._tell(f"  {command:<10} {summary}")
        elif name == "/settings":
            self._show()
        elif name == "/set":
            self._set(words)
        elif name in _CHOSEN:
            self._choose(name, words)
        elif name == "/again":
            self._again()
        elif name in ("/new", "/undo"):
            if self._chat is None:
                raise MarsError(f"{name} does not apply without --chat, where every line is its own prompt.")
            if name == "/new":
                self._chat.clear()
            else:
                self._chat.undo()
        return name != "/quit"

    def _answer(self, text: str) -> None:
        printer = TextPrinter(self._out, colours=self._job.drafts)
        completion = None
        # Ctrl-C ends the answer after the current step. In a chat, closing the stream records the partial text as the
        # answer.
        with signals.stoppable() as stop_event, contextlib.closing(self._events(text)) as events:
            self._last, self._count = text, self._count + 1
            # Outside a chat, print the prompt again, so that its continuation follows it.
            if self._chat is None:
                printer.prompt(text, chat=False)
            for event in events:
                if isinstance(event, Finished):
                    completion = event.completion
                    break
                for kind, piece in event.pieces:
                    printer.piece(kind, piece)
                if stop_event.is_set():
                    break
        printer.end()
        if completion is None:
            self._tell("stopped", "dim")
            return
        check_finite(self._job.session.target, [completion])
        self._tell(line_of(completion, drafts=self._job.drafts, read=self._running.read), "dim")
        context_length = self._job.session.target.config.max_positions
        if len(completion.request.prompt_tokens) + len(completion.tokens) >= context_length:
            cure = "" if self._chat is None else ": /undo removes turns, /new starts over"
            self._tell(f"the context of {context_length} tokens is full{cure}")

    def _events(self, text: str) -> Generator[Said | Finished, None, None]:
        if self._chat is None:
            return self._running.stream(self._request(PromptRow(where="", prompt=text)))
        return self._chat.stream(text)

    def _again(self) -> None:
        if self._last is None:
            raise MarsError("there is no prompt to answer again: type one first.")
        # In a chat, the new answer replaces the last one.
        if self._chat is not None and self._chat.messages:
            self._last = self._chat.undo()
        self._answer(self._last)

    def _request(self, row: PromptRow) -> Request:
        """Return the request for a line of input. Line i uses the seed --seed + i, as in a prompts file."""
        seed = ((self._args.seed or 0) + self._count) % 2**32
        args = argparse.Namespace(**(vars(self._args) | {"seed": seed}))
        [request] = make_job_requests(self._job.session.target, args, [row])
        return request

    def _turns_request(self, turns: Sequence[Turn]) -> Request:
        return self._request(PromptRow(where="", messages=tuple(dict(turn) for turn in turns)))

    def _show(self) -> None:
        # /set may have changed the rule since the job was opened.
        run_settings = dict(self._job.run) | self._args.rule.as_json()
        [request] = make_job_requests(self._job.session.target, self._args, _ROW)
        settings = {name: run_settings[name] for name in ("target", "draft", "verify", "dtype")}
        settings |= run_settings["settings"]
        settings |= {name: getattr(request, name) for name in SAMPLING}
        for name, value in settings.items():
            self._tell(f"  {name:<20} {value}")

    def _set(self, words: list[str]) -> None:
        """Parse the command line again with the flag for this setting, so that errors are the same as for the flag."""
        rule_options = {name: option for name, option in self._args.rule.options.items() if option.flag}
        names = [*SAMPLING, *rule_options]
        if len(words) != 2:
            raise MarsError(
                f"/set takes NAME VALUE, as in /set temperature 0.7: NAME is one of {', '.join(names)}."
            )
        name = words[0].removeprefix("--").replace("-", "_")
        if name not in names:
            suggestion = did_you_mean(name, names)
            raise MarsError(f"there is no setting {words[0]}{suggestion}: expected {', '.join(names)}.")
        argv = [*self._argv, flag_of(name), words[1]]  # if a flag is given twice, the last one counts
        args, _ = _parsed(argv)
        # Request settings take effect from the next line on. Changing a setting of the rule creates a new rule.
        if name in rule_options:
            session = self._job.session
            self._running.session = session.using(load_rule(args.rule, session.target, _ROW))
        self._argv, self._args = argv, args

    def _choose(self, name: str, words: list[str]) -> None:
        """Open the job again with a different rule or draft, reusing the loaded target."""
        flags = _CHOSEN[name]
        names = {"/rule": rules, "/draft": definitions}[name]()
        if not words or words[0].startswith("-"):
            raise MarsError(
                f"{name} takes a name first, {COMMANDS[name].partition(', ')[2]}: expected {', '.join(names)}."
            )
        # A word such as -1 or -.5 is a value, not a flag.
        for flag in (word.partition("=")[0] for word in words if re.match(r"-[^\d.]", word)):
            if flag not in flags:
                raise MarsError(
                    f"{name} takes no {flag}{did_you_mean(flag, flags)}: expected {', '.join(flags[1:])}."
                )
        # Flags of the old rule or draft must not apply to the new one.
        argv = without(self._argv, flags)
        if name == "/draft" and not any(word.partition("=")[0] == "--verify" for word in argv):
            argv += ["--verify", self._args.rule.spec]  # keep the rule: its default depends on the draft
        argv += [flags[0], *words]
        args, choices = _parsed(argv)
        # Other words that are not flags would become prompts.
        if args.prompts != self._args.prompts:
            raise MarsError(f"{name} takes one name, and then flags: {', '.join(flags[1:])}.")
        with busy("loading"):
            job = open_job(args, choices, _ROW, self._job.session.target)
        self._argv, self._args, self._job = argv, args, job
        self._running.session = job.session
        self.compile()
        self._tell(self._pair(), "dim")
        if job.trusts:  # the first legend may lack this colour
            self._legend()


def _parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, Choices]:
    args = parse(argv)
    check_interactive_flags(args)
    return args, check_flags(args, _ROW)
