"""Programs that try to get out of the sandbox, one line of intent each; `test_sandbox` says what must not come of them.

`{outside}` is a folder that holds `outside.txt` and is not the program's. No program tells by its verdict whether it
got what it wanted, unless the table says so.
"""

WRITES = {
    "open": "open('{outside}/new', 'w').write('x')",
    "open the file": "open('{outside}/outside.txt', 'w').write('theirs')",
    "append": "open('{outside}/outside.txt', 'a').write('theirs')",
    "os.open": "import os; os.open('{outside}/outside.txt', os.O_RDWR | os.O_TRUNC)",
    "up and down": "import os; open('../' * 30 + '{outside}/new', 'w')",
    "up from below": "import os\nos.makedirs('a/b')\nos.chdir('a/b')\nopen('../' * 30 + '{outside}/new', 'w')",
    "chdir": "import os; os.chdir('{outside}'); open('new', 'w')",
    "unlink": "import pathlib; pathlib.Path('{outside}/outside.txt').unlink()",
    "rename": "import os; os.rename('{outside}/outside.txt', 'here')",
    "rename to": "import os; open('x', 'w'); os.rename('x', '{outside}/outside.txt')",
    "truncate": "import os; os.truncate('{outside}/outside.txt', 0)",
    "symlink": "import os; os.symlink('{outside}', 'link'); open('link/outside.txt', 'w')",
    "link": "import os; os.link('{outside}/outside.txt', 'link'); open('link', 'w')",
    "rmtree": "import shutil; shutil.rmtree('{outside}')",
    "sqlite3": "import sqlite3\nc = sqlite3.connect('{outside}/new')\nc.execute('create table t (a)')\nc.commit()",
    "attach": "import sqlite3\nc = sqlite3.connect(':memory:')\nc.execute(\"attach '{outside}/new' as n\")\n"
    "c.execute('create table n.t (a)')\nc.commit()",
    "dbm": "import dbm; dbm.open('{outside}/new', 'c')",
    "mkfifo": "import os; os.mkfifo('{outside}/new')",
    "mknod": "import os; os.mknod('{outside}/new')",
    "mkfifo of posix": "import posix; posix.mkfifo('{outside}/new')",
    "mkfifo of a new posix": "import sys; del sys.modules['posix']; import posix; posix.mkfifo('{outside}/new')",
    "mkfifo of a set": "import os\nfor f in os.supports_dir_fd:\n"
    "    if f.__name__ == 'mkfifo':\n        f('{outside}/new')",
    "mkdir by dir_fd": "import os; os.mkdir('new', dir_fd=os.open('{outside}', os.O_RDONLY))",
    "open by dir_fd": "import os; os.open('outside.txt', os.O_RDWR | os.O_TRUNC, dir_fd=os.open('{outside}', 0))",
    "open up from a dir_fd": "import os\nos.makedirs('a/b')\nfd = os.open('.', 0)\nos.chdir('a/b')\n"
    "os.open('../{name}/new', os.O_RDWR | os.O_CREAT, dir_fd=fd)",
    "fchdir": "import os; os.fchdir(os.open('{outside}', 0)); open('new', 'w')",
    "ctypes": "import ctypes; ctypes.CDLL(None).creat(b'{outside}/new', 0o644)",
    "patched tables": "import sys\nm = sys.modules['__main__']\nm.WRITES = 0\nm.REFUSED = ()\nm.PATH_EVENTS = {{}}\n"
    "open('{outside}/new', 'w')",
    "patched realpath": "import os; os.path.realpath = lambda p: os.getcwd() + '/x'; open('{outside}/new', 'w')",
    "patched builtins": "import builtins\nbuiltins.isinstance = lambda *a: True\nopen('{outside}/new', 'w')",
    "a text of its own kind": "class T(str):\n    def startswith(self, *a):\n        return True\n"
    "    def split(self, *a):\n        return []\nopen(T('{outside}/new'), 'w')",
    "an interpreter without the hook": "import _xxsubinterpreters as s\n"
    "s.run_string(s.create(), \"open('{outside}/new', 'w')\")",
    "a process": "import sys\nsys.audit = lambda *a: None\nimport subprocess\n"
    "subprocess.run(['/bin/sh', '-c', 'echo > {outside}/new'])",
    "a forked process": "import ctypes, os\nc = ctypes.CDLL(None)\n"
    "if c.fork() == 0:\n    c.creat(b'{outside}/new', 0o644)\n    c._exit(0)\nc.wait(None)",
}

SEES = {
    "a file": "assert open('{outside}/outside.txt').read() == 'mine'",
    "a file by dir_fd": "import os; os.open('outside.txt', 0, dir_fd=os.open('{outside}', 0))",
    "a file by ctypes": "import ctypes; assert ctypes.CDLL(None).open(b'{outside}/outside.txt', 0) >= 0",
    "the home": "import os; assert set(os.listdir('{home}')) - {known}",
    "the parent's environment": "import os; assert open('/proc/{pid}/environ', 'rb').read()",
    "the parent's environment by number": "import os; assert open(f'/proc/{{os.getppid()}}/environ', 'rb').read()",
    "the parent's arguments": "import os; assert open('/proc/{pid}/cmdline', 'rb').read()",
    "the parent's environment by dir_fd": "import os; assert os.read(os.open('environ', 0, dir_fd="
    "os.open('/proc/{pid}', 0)), 9)",
}
"""These come to their end, and so pass, where they see what they look for."""

OUTLIVES = {
    "subprocess": "import sys\nsys.audit = lambda *a: None\nimport subprocess\n"
    "subprocess.Popen(['/bin/sleep', '{seconds}'], start_new_session=True)",
    "subprocess, and then no end": "import sys, time\nsys.audit = lambda *a: None\nimport subprocess\n"
    "subprocess.Popen(['/bin/sleep', '{seconds}'], start_new_session=True)\ntime.sleep(60)",
    "ctypes": "import ctypes, time\nc = ctypes.CDLL(None)\nif c.fork() == 0:\n    c.setsid()\n    c.fork()\n"
    "    c.execl(b'/bin/sleep', b'sleep', b'{seconds}', None)\ntime.sleep(0.5)",
}
"""Each starts a `sleep` of so many seconds in a session of its own."""

FORGES = {
    "the code of argv": "import os, sys; os._exit(int(sys.argv[1]))",
    "the codes of argv": "import os, sys\n"
    "for word in sys.argv[::-1]:\n    if word.isdigit():\n        os._exit(int(word))\nos._exit(3)",
    "the variable below": "import os, sys; os._exit(sys._getframe(1).f_locals['passed'])",
    "an exit": "import os; os._exit(0)",
    "an exit of Python": "import sys; sys.exit(0)",
    "words on every pipe": "import os\nfor fd in range(64):\n    try:\n        os.write(fd, b'x' * 16)\n"
    "    except OSError:\n        pass\nos._exit(0)",
    "what the frames hold": """
import os, sys
frame, found = sys._getframe(), []
while frame:
    found += [*frame.f_locals.values(), *frame.f_globals.values()]
    frame = frame.f_back
for _ in range(2):
    for value in found[:]:
        if isinstance(value, (list, tuple, set)):
            found += list(value)
        elif callable(value) and getattr(value, '__closure__', None):
            found += [cell.cell_contents for cell in value.__closure__ if cell]
tokens = set()
for value in found:
    try:
        tokens.add(value if type(value) is bytes else bytes.fromhex(value))
    except (TypeError, ValueError):
        pass
for token in tokens:
    for fd in range(3, 64):
        try:
            len(token) == 16 and os.write(fd, token)
        except OSError:
            pass
for value in found:
    if type(value) is int and 2 < value < 120:
        os._exit(value)
os._exit(0)
""",
    "what the collector knows": "import gc, os, sys\nfor f in (sys._getframe(1), *gc.get_objects()):\n"
    "    for value in gc.get_referents(f):\n        if type(value) is bytes and len(value) == 16:\n"
    "            for fd in range(3, 64):\n                try:\n                    os.write(fd, value)\n"
    "                except OSError:\n                    pass\nos._exit(0)",
    "a jump over the test": """
import sys
def trace(frame, event, arg):
    if event == 'line' and frame.f_lineno == 10:
        frame.f_lineno = 11
    return trace
def tests():
    sys.settrace(trace)
    sys._getframe().f_trace = trace
    assert False
    return 1
tests()
""",
}
"""None of these comes to its end, so none may pass."""

CONNECTS = {
    "socket": "import socket; socket.create_connection(('127.0.0.1', {port}))",
    "ctypes": "import ctypes, struct\nc = ctypes.CDLL(None)\nfd = c.socket(2, 1, 0)\n"
    "c.connect(fd, struct.pack('=HHI8x', 2, {swapped}, 0x0100007F), 16)",
}
