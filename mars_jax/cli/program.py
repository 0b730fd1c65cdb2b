"""Code that all commands share: parser, exit codes, one-line errors for bad input, and the compilation cache."""

from __future__ import annotations

import argparse
import contextlib
import copy
import errno
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from mars_jax.cli import remote
from mars_jax.cli.progress import heartbeat
from mars_jax.cli.quiet import quiet
from mars_jax.utils import user_code
from mars_jax.utils.errors import MarsError, MarsWarning, did_you_mean, say, unwritable
from mars_jax.utils.paths import check_path
from mars_jax.utils.version import __version__

BAD_INPUT = 2
INTERRUPTED = 130  # 128 + SIGINT, as in shells
BROKEN_PIPE = 141  # 128 + SIGPIPE
PATHS = ("PATH", "FILE", "DIR", "SRC", "DST", "TARGET")
"""Metavars of arguments whose value is or may be a path."""


class _Formatter(argparse.HelpFormatter):
    """Formatter that wraps the paragraphs of a description, except those with indented lines, such as examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        for i, paragraph in enumerate(paragraphs):
            if not re.search(r"^ ", paragraph, re.MULTILINE):
                paragraphs[i] = textwrap.fill(paragraph, width, break_on_hyphens=False)
        return "\n\n".join(paragraphs)


class Parser(argparse.ArgumentParser):
    """Parser of every command. It accepts no abbreviations, because adding a flag could change their meaning.

    Args:
      short: names of the arguments that `--help` shows; `--help-all` then shows every argument. If None, `--help` shows
        every argument.
      options: additional arguments for `argparse.ArgumentParser`.
    """

    def __init__(self, *, short: Collection[str] | None = None, add_help: bool = True, **options: Any):
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, add_help=False, **options)
        self._short = short
        # By default argparse interprets -1e-3 and -inf as flags.
        self._negative_number_matcher = re.compile(r"-(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?$|-inf$")
        self._positionals.title = "arguments"
        if add_help:
            shown_flags = "the flags"
            if short is not None:
                shown_flags = "the flags that most people need"
            self.add_argument("-h", "--help", action=_Help, nargs=0, help=f"explain {shown_flags}")
            self.add_argument("--version", action="version", version=f"mars-jax {__version__}")
            if short is not None:
                self.add_argument("--help-all", action=_Help, nargs=0, help="explain all flags")

    def format_short(self) -> str:
        """Return the help of the `short` flags, with each text cut at its first semicolon."""
        if self._short is None:
            return self.format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in self._action_groups:
            # Shorten the help only in copies of the actions, because --help-all prints the full help.
            actions = [copy.copy(action) for action in group._group_actions if action.dest in self._short]
            for action in actions:
                action.help = (action.help or "").partition("; ")[0]
            formatter.start_section(group.title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text((self.epilog or "").partition("\n\n")[0])  # the first examples
        num_flags = sum(bool(action.option_strings) for action in self._actions)
        formatter.add_text(f"--help-all explains all {num_flags} flags.")
        return formatter.format_help()

    def kinds(self) -> dict[str, Parser]:
        """Return the parsers of the subcommands, keyed by name."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return dict(action.choices)
        return {}

    def groups(self) -> dict[str, argparse._ArgumentGroup]:
        """Return the argument groups that are not empty, keyed by title."""
        return {str(group.title): group for group in self._action_groups if group._group_actions}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown flags here, because only the parser of the subcommand can suggest similar ones."""
        parsed_flags, unknown_words = super().parse_known_args(args, namespace)
        if unknown_words:
            self.error(f"unrecognized arguments: {' '.join(unknown_words)}")
        return parsed_flags, unknown_words

    def error(self, message: str) -> NoReturn:
        """Raise MarsError instead of printing argparse's usage. Suggest a similar flag or choice."""
        suggestion = ""
        # argparse passes only the complete message, so extract the flag or the value from it. Only some versions of
        # Python quote the choices.
        invalid_choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if message.startswith("unrecognized arguments: "):
            flag = next((word for word in message.split()[2:] if word.startswith("--")), "")
            suggestion = did_you_mean(flag.partition("=")[0], self._option_string_actions)
        elif invalid_choice is not None:
            suggestion = did_you_mean(invalid_choice[1], re.findall(r"[\w.-]+", invalid_choice[2]))
        raise MarsError(f"{message.removeprefix('argument ').rstrip('.')}{suggestion}; --help lists flags.")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Refuse values that are invalid for any flag or path, before opening a file.

        An empty value usually comes from an unset shell variable. It would silently select the default or the current
        folder. A URL in place of a local path would create a folder with that name.
        """
        # Name of the argument for messages: the long form of a flag, or the metavar of a positional argument.
        name = [str(action.metavar or action.dest), *action.option_strings][-1]
        is_path = action.type is Path or action.metavar in PATHS
        # An empty PROMPT is refused later, with a message about prompts.
        if "" in arg_strings and (action.option_strings or action.metavar in PATHS):
            cure = ", or leave it out" if action.option_strings else ""
            raise MarsError(f"{name} is empty; a shell variable may be unset: give it a value{cure}.")
        for text in arg_strings:
            if action.type is Path:
                remote.refuse(text, name)
            if is_path and not remote.is_url(text):
                check_path(text, name)
        return super()._get_values(action, arg_strings)


class _Help(argparse.Action):
    """Print the short help, or for --help-all the full help, and exit."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any):
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, **options)

    def __call__(
        self, parser: Any, namespace: object, values: object, option_string: str | None = None
    ) -> None:
        text = parser.format_help() if option_string == "--help-all" else parser.format_short()
        print(text, end="")
        parser.exit()


def command(
    parse: Callable[[Sequence[str]], argparse.Namespace],
    run: Callable[[argparse.Namespace, IO[str]], int | None],
    argv: Sequence[str],
) -> int:
    """Run `run(parse(argv), stdout)`; return its exit code (0 for None), or that of the error that it raised.

    `parse` may print to stdout, as for --help. `run` writes the result to stdout.
    """

    def parsed(argv: Sequence[str], out: IO[str]) -> int | None:
        # `_program` has redirected stdout to stderr, but --help and --version belong on stdout.
        with contextlib.redirect_stdout(out):
            args = parse(argv)
        try:
            return run(args, out)
        except MarsError:
            raise
        except Exception as error:
            # Name the output file in the error, because a library's error may not name it.
            if clear_error := unwritable(error, getattr(args, "output", None)):
                raise clear_error from error
            raise

    return program(parsed, argv)


def program(run: Callable[[Sequence[str], IO[str]], int | None], argv: Sequence[str]) -> int:
    """Run `run(argv, stdout)`; return its exit code (0 for None), or that of the error that it raised."""
    quiet()
    with heartbeat():
        exit_code = _program(run, argv)
    # If JAX was never imported, this process has not joined any others.
    if exit_code and "jax" in sys.modules:
        from mars_jax.utils import hosts

        hosts.leave(exit_code)
    return exit_code


def _program(run: Callable[[Sequence[str], IO[str]], int | None], argv: Sequence[str]) -> int:
    stdout = sys.stdout
    try:
        # Redirect stdout, because output from libraries must not mix with the result.
        with contextlib.redirect_stdout(sys.stderr), _one_line_warnings():
            _check_switch()
            try:
                return run(argv, stdout) or 0
            except (RuntimeError, AssertionError):
                # JAX initialises its devices on first use, which can happen anywhere. If the initialisation failed,
                # replace the error with a clear one.
                if "jax" in sys.modules:
                    from mars_jax.utils import hosts

                    hosts.check_devices()
                raise
            finally:
                try:
                    # Flush now, because a flush that fails when Python exits prints several lines and changes the exit
                    # code.
                    stdout.flush()
                except OSError as error:
                    _discard(stdout)
                    if error.errno == errno.EBADF:
                        raise MarsError("stdout is closed: direct it to a file or a pipe.") from None
                    raise
    except MarsError as error:
        _say(f"error: {' '.join(str(error).split())}")
        return BAD_INPUT
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        return BROKEN_PIPE
    except (Exception, SystemExit) as error:
        # A SystemExit from a user's file is an error; one from argparse, after --help, is raised again below. Keep
        # tracebacks of bugs in this package.
        user_failure = user_code.failure(error, user_code.frames_in(user_code.MODULES, error))
        if user_failure is not None:
            _say(f"error: {user_failure}.")
        elif sentence := unwritable(error):
            _say(f"error: {sentence}")
        else:
            raise
        return BAD_INPUT


def _check_switch() -> None:
    """Check MARS_JAX_PALLAS early: `kernels_pallas.dispatch.switched_on` checks it only once weights are loaded."""
    switch = os.environ.get("MARS_JAX_PALLAS") or "1"
    if switch not in ("0", "1"):
        raise MarsError(f"MARS_JAX_PALLAS is {switch!r}: expected 0, which turns Pallas kernels off, or 1.")


@contextlib.contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Print each MarsWarning once, as one line on stderr, regardless of Python's filters."""
    with warnings.catch_warnings():
        show_warning = warnings.showwarning

        def show_one_line(message: Warning | str, category: type[Warning], *place: Any) -> None:
            if issubclass(category, MarsWarning):
                _say(f"warning: {' '.join(str(message).split())}")
            else:
                show_warning(message, category, *place)

        warnings.showwarning = show_one_line
        warnings.simplefilter("default", MarsWarning)
        yield


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed too
        say(sentence)


def keep_compilations() -> None:
    """Keep compiled programs between runs, by default in the user's cache folder.

    JAX reads JAX_COMPILATION_CACHE_DIR and JAX_ENABLE_COMPILATION_CACHE itself.
    """
    import jax

    from mars_jax.serve.programs import keep_programs
    from mars_jax.utils.compilations import enable_compilation_cache

    is_default = jax.config.jax_compilation_cache_dir is None  # pyright: ignore[reportAttributeAccessIssue]
    with contextlib.suppress(MarsError):  # raised if the user has no home folder
        folder = enable_compilation_cache()
        if is_default:
            keep_programs(folder)


def _discard(out: IO[str]) -> None:
    """Redirect an unwritable stream to /dev/null, so that the flush at exit succeeds."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
