"""Interactive `generate`: same output as the library, chat turns that share one cache, and a real terminal."""

import contextlib
import io
import re
import shutil
import stat
import sys
import time

import pytest

import mars_jax as mj
from mars_jax.cli import signals
from mars_jax.cli.generate import job, repl
from mars_jax.cli.generate.arguments import parse
from mars_jax.cli.generate.command import main
from mars_jax.cli.generate.terminal import _CONTROLS, TextPrinter
from mars_jax.cli.open_target import open_target
from tests.helpers.shell import Shell, strip_escapes

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}a:"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(scope="module")
def chatty(target, tmp_path_factory):
    path = shutil.copytree(target, tmp_path_factory.mktemp("chatty") / "target")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture
def talk(monkeypatch, target):
    """Return a function that runs a session on `lines` and returns (stdout, stderr). None is Ctrl-C, the end Ctrl-D."""

    def run_session(*flags, lines, target=target):
        waiting = list(lines)

        def ask(prompt):
            if not waiting:
                raise EOFError
            if (line := waiting.pop(0)) is None:
                raise KeyboardInterrupt
            return line

        @contextlib.contextmanager
        def editing(out, words):
            yield ask

        monkeypatch.setattr(repl, "editing", editing)
        out, err = Terminal(), Terminal()
        rule = [] if "none" in flags else ["--verify", "mars"]
        argv = ["--target", str(target), "--draft", "ngram", *rule, "--max-new-tokens", "8", *flags]
        with contextlib.redirect_stderr(err):
            repl.talk(argv, parse(argv), out)
        return strip_escapes(out.getvalue()), " ".join(strip_escapes(err.getvalue()).split())

    return run_session


def shown(text):
    """Return text as the terminal shows it: control characters replaced, and a newline at the end."""
    return text.translate(_CONTROLS) + "\n" * (not text.endswith("\n"))


def reads_of(err):
    """Return (tokens read, prompt tokens) of each answer."""
    return [tuple(map(int, pair)) for pair in re.findall(r"read (\d+) of (\d+) prompt tokens", err)]


@pytest.mark.slow
def test_a_line_is_a_prompt_of_its_own(talk, target):
    prompts = ["a story", "a story of the", "the sea\ta"]
    out, err = talk("--verify", "exact", lines=[prompts[0], "", prompts[1], None, "  ", prompts[2]])
    loaded = mj.load(str(target))
    texts = mj.generate(loaded, "ngram", prompts, max_new_tokens=8).text
    first, second, third = (shown(prompt + text) for prompt, text in zip(prompts, texts, strict=True))
    # A dropped line and the end of the input each print a newline.
    assert out == f"{first}{second}\n{third}\n"
    assert err.count("8 tokens in") == 3 and "rule exact; /help lists commands" in err
    unread = [length - read for read, length in reads_of(err)]
    assert unread[0] == unread[2] == 1 and unread[1] > 2


def test_a_chat_keeps_its_turns(talk, chatty):
    """Repeat an answer after /undo and /again: the text is the same, and no prompt tokens are read again."""
    lines = ["the sun", "and?", "/undo", "and?", "/again", "/new", "the sun"]
    out, err = talk("--chat", lines=lines, target=chatty)
    reads = reads_of(err)
    assert reads[1][0] < reads[1][1] - 8 and [read for read, _ in reads[2:4]] == [0, 0]
    chat = mj.Chat(mj.load(str(chatty)), "ngram", verify=mj.verify.mars(), max_new_tokens=8)
    first, second = (shown(chat.say(text).text) for text in lines[:2])
    assert out == first + 3 * second + first + "\n"


@pytest.mark.slow
def test_settings_change_what_follows(talk):
    changes = ["/set theta 0.5", "/settings", "/set temperature 0.9"]
    _, err = talk(lines=["a story", "/set max-new-tokens 3", "/again", *changes, "/again"])
    assert [int(n) for n in re.findall(r"(\d+) tokens in", err)] == [8, 3, 3]
    assert "theta 0.5 " in err and "max_new_tokens 3 " in err and "verify mars" in err


def test_the_rule_and_the_draft_change_over_the_same_target(talk, chatty, monkeypatch):
    """The new draft and rule answer with the conversation so far, and the target is not loaded again."""
    opened = []
    monkeypatch.setattr(job, "open_target", lambda *args: opened.append(args) or open_target(*args))
    lines = ["the sun", "/draft none", "/rule exact", "/draft none", "and?"]
    lines += ["/draft ngram --num-draft-tokens 2", "so"]
    out, err = talk("--chat", "--theta", "0.5", lines=lines, target=chatty)
    assert len(opened) == 1
    assert "error: --verify mars does not apply to --draft none" in err  # and nothing changes
    pairs = re.findall(r"target, (\w+), rule (\w+)", err)
    assert pairs == [("ngram", "mars"), ("ngram", "exact"), ("none", "exact"), ("ngram", "exact")]
    # Each new pair starts with new caches.
    reads = reads_of(err)
    assert len(reads) == 3 and all(read == total - 1 for read, total in reads)
    # Oracle: a chat whose turns are answered by the same drafts and rules.
    loaded, turns, answers = mj.load(str(chatty)), [], ""
    for text, draft, rule in (
        ("the sun", "ngram", mj.verify.mars(theta=0.5)),
        ("and?", "none", mj.verify.exact()),
        ("so", "ngram", mj.verify.exact()),
    ):
        chat = mj.Chat(loaded, draft, verify=rule, max_new_tokens=8)
        chat.messages = turns
        answers += shown(chat.say(text).text)
        turns = chat.messages
    assert out == answers + "\n"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/hepl", "there is no command /hepl (did you mean /help?): /help lists them"),
        ("/new now", "/new takes no arguments: leave 'now' out."),
        ("/undo", "/undo does not apply without --chat"),
        ("/again", "there is no prompt to answer again: type one first."),
        ("/set", "/set takes NAME VALUE, as in /set temperature 0.7: NAME is one of temperature"),
        ("/set thta 1", "there is no setting thta (did you mean theta?)"),
        ("/set theta x", "--theta is x: expected"),
        ("/rule", "/rule takes a name first, as in /rule mars --theta 0.8: expected exact, "),
        ("/rule mras", "there is no rule 'mras' (did you mean mars?)"),
        ("/rule mars -h", "/rule takes no -h: expected"),
        ("/rule mars 0.8", "/rule takes one name, and then flags: --"),
        ("/draft eagle", "--draft is eagle: "),
        ("/draft ngram --target x", "/draft takes no --target (did you mean --tree?): expected --tree, "),
        ("/set top_k 5", "--top-k does not apply at temperature 0"),
        ("word " * 80, "the prompt has"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_the_session_goes_on(talk, line, sentence):
    _, err = talk(lines=[line, "a story"])
    assert f"error: {sentence}" in err and "8 tokens in" in err


def test_help_lists_every_command(talk):
    _, err = talk(lines=["/help", "/quit", "never asked"])
    assert all(command in err for command in repl.COMMANDS) and "tokens in" not in err


def test_ctrl_c_stops_an_answer_and_keeps_the_session(talk, chatty, monkeypatch):
    """The stopped answer stays in the conversation as a turn."""
    write, calls = TextPrinter.piece, []
    stoppable, events = signals.stoppable, []

    @contextlib.contextmanager
    def recorded():
        with stoppable() as event:
            events.append(event)
            yield event

    monkeypatch.setattr(signals, "stoppable", recorded)

    def piece(self, kind, text):
        write(self, kind, text)
        calls.append(text)
        if len(calls) == 2:
            events[-1].set()

    monkeypatch.setattr(TextPrinter, "piece", piece)
    flags = ["--chat", "--max-new-tokens", "12", "--draft", "none"]
    out, err = talk(*flags, lines=["the sun", "and?"], target=chatty)
    assert "stopped" in err and "12 tokens in" in err
    chat = mj.Chat(mj.load(str(chatty)), "none", max_new_tokens=12)
    text = "".join(calls[:2])
    chat.messages = [{"role": "user", "content": "the sun"}, {"role": "assistant", "content": text.strip()}]
    assert out == shown(text) + shown(chat.say("and?").text) + "\n"


@pytest.mark.parametrize(
    "flags", ["--json", "--compare", "--no-stream", "--batch-size=4", "--samples=2", "--output=x"]
)
def test_flags_of_prompts_that_are_there_are_refused(flags, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main([flags]) == 2
    assert f"{flags.partition('=')[0]} does not apply without prompts" in capsys.readouterr().err


def test_the_history_is_the_users_alone(monkeypatch, tmp_path):
    readline = pytest.importorskip("readline")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("builtins.input", lambda prompt: (readline.add_history("a story"), "a story")[1])
    with repl.editing(io.StringIO(), ["/new"]) as ask:
        assert ask("> ") == "a story"
    path = repl.history_file()
    assert path.read_text() == "a story\n" and path.is_relative_to(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with repl.editing(io.StringIO(), ["/new"]):
        assert readline.get_history_item(1) == "a story"


PROMPT = r"\n(\x1b\[\?2004h)?> $"
DONE = rf"prompt\s+tokens[^>]*{PROMPT[2:]}"


def session(target, tmp_path, *flags):
    command = f"-m mars_jax.generate --target {target} --draft ngram --max-new-tokens 8".split()
    return Shell(*command, *flags, XDG_STATE_HOME=str(tmp_path), TERM="xterm-256color")


@pytest.mark.slow
def test_a_real_terminal(target, tmp_path):
    """Test colours, editing, history, interrupts, wide characters and the end of the input."""
    shell = session(target, tmp_path)
    greeting = shell.until(PROMPT)
    greeting = " ".join(strip_escapes(greeting).split())
    assert "/help lists commands, Ctrl-D leaves" in greeting and "corrected the target's own" in greeting
    shell.send("a storz\x7fy\n")  # a backspace
    assert re.search(r"\x1b\[3[26]m", shell.until(DONE))
    time.sleep(1)  # readline misses an interrupt between printing its prompt and waiting for input
    shell.send("a line that is dropped\x03")
    shell.until(PROMPT)
    shell.send("\x1b[A!\n")  # the previous line, extended
    assert "a story!" in strip_escapes(shell.until(DONE))
    shell.send("猫は赤い😀\n")
    # The prompt is echoed as typed, and printed again before its continuation.
    assert strip_escapes(shell.until(DONE)).count("猫は赤い😀") == 2
    shell.send("/se\t\n")  # completes to /set, the common prefix of /set and /settings
    assert "/set takes NAME VALUE" in strip_escapes(shell.until(PROMPT))
    shell.send("\x04")
    assert shell.wait() == 0
    assert (tmp_path / "mars_jax" / "history").read_text().split("\n")[:2] == ["a story", "a story!"]


@pytest.mark.slow
def test_a_real_interrupt_stops_a_long_answer(tmp_path):
    shell = session("tiny/target", tmp_path, "--max-new-tokens", "400", "--draft", "none", "--ignore-eos")
    shell.until(PROMPT)
    shell.send("Once upon a time\n")
    shell.until(r"(?s)Once upon a time.*Once upon a time\S*,")
    shell.send("\x03")
    assert "stopped" in shell.until(rf"stopped[^>]*{PROMPT[2:]}")
    shell.send("/set max_new_tokens 4\nOnce upon\n")
    assert "4 tokens in" in strip_escapes(shell.until(DONE))
    shell.send("\x04")
    assert shell.wait() == 0
