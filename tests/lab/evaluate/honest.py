"""Programs as models write them, with their usual endings: each is right, so each has to pass.

They also pass one after the other, as one program; the first one needs the folder as it was.
"""

HONEST = {
    "begins in an empty folder": "import os; assert os.listdir() == []",
    "prints": "import math, collections, typing, re\nassert math.pi > 3\nprint('x' * 100)",
    "is the main module": "if __name__ == '__main__':\n    assert input is not None",
    "writes a file of its own": "open('own.txt', 'w').write('x'); assert open('own.txt').read() == 'x'",
    "makes folders": "import os, shutil; os.makedirs('a/b/c'); os.rename('a/b', 'd'); shutil.rmtree('d')\n"
    "shutil.rmtree('a')",
    "works by paths": "from pathlib import Path\np = Path('p')\np.mkdir()\n(p / 'b').write_text('x')\n"
    "(p / 'b').rename(p / 'c')\nassert {q.name for q in Path.cwd().rglob('*')} >= {'p', 'c'}\n(p / 'c').unlink()",
    "makes temporary files": "import tempfile\nwith tempfile.TemporaryDirectory() as d:\n"
    "    open(d + '/x', 'w').write('y')\nwith tempfile.NamedTemporaryFile('w') as f:\n    f.write('x')\n"
    "tempfile.TemporaryFile().write(b'x')",
    "runs coroutines": "import asyncio\nasync def two():\n    await asyncio.sleep(0.01)\n"
    "    return await asyncio.to_thread(lambda: 2)\nassert asyncio.run(two()) == 2",
    "has threads": "from concurrent.futures import ThreadPoolExecutor\n"
    "with ThreadPoolExecutor(4) as p:\n    assert list(p.map(abs, [-1, 2])) == [1, 2]",
    "drops what is printed": "import contextlib, os\nwith open(os.devnull, 'w') as f, contextlib.redirect_stdout(f):\n"
    "    print('x')",
    "draws numbers": "import os, random, secrets, uuid\nrandom.random(), secrets.token_hex(), uuid.uuid4()",
    "imports much": "import csv, ctypes.util, dataclasses, decimal, email, enum, fractions, http.client, inspect\n"
    "import json, logging, multiprocessing, pickle, queue, sqlite3, statistics, typing, unittest, urllib.request",
    "makes records": "import collections, dataclasses, enum, typing\nP = collections.namedtuple('P', 'x y')\n"
    "@dataclasses.dataclass\nclass D:\n    x: int = 0\nassert P(1, 2).x == D(1).x",
    "imports numpy": "import numpy; assert numpy.arange(4).sum() == 6",
    "no input": "import sys; assert sys.stdin.read() == '' and list(sys.stdin) == []",
    # Endings; `exit()` closes stdin.
    "doctest": "def one():\n    '''\n    >>> one()\n    1\n    '''\n    return 1\n"
    "import doctest\nassert doctest.testmod().attempted > 0",
    "doctest under a guard": "if __name__ == '__main__':\n    import doctest\n    doctest.testmod(verbose=True)",
    "unittest": "import unittest\nclass T(unittest.TestCase):\n    def test_one(self):\n"
    "        self.assertEqual(1, 1)\n"
    "assert unittest.main(exit=False).result.testsRun > 0",
    "unittest under a guard": "import unittest\nif __name__ == '__main__':\n    unittest.main()",
    "a suite": "import unittest\ncase = unittest.FunctionTestCase(lambda: None)\n"
    "assert unittest.TextTestRunner().run(unittest.TestSuite([case])).wasSuccessful()",
    "an exit under a guard": "import sys\ndef main():\n    return 0\nif __name__ == '__main__':\n    sys.exit(main())",
    "a plain exit under a guard": "if __name__ == '__main__':\n    print('done')\n    exit()",
    "an exit that is expected": "import sys\ntry:\n    sys.exit(2)\nexcept SystemExit as e:\n    assert e.code == 2",
    "atexit": "import atexit; atexit.register(print, 'bye')",
    "an error that is expected": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass\nelse:\n    assert False",
    # The module and its surroundings.
    "its file": "import os\nassert os.path.isfile(__file__) and open(__file__).read()",
    "the folder of its file": "from pathlib import Path\nassert Path(__file__).resolve().parent.is_dir()",
    "its arguments": "import argparse, sys\nassert argparse.ArgumentParser().parse_args() and sys.argv[0] == __file__",
    "itself as a module": "import sys, __main__\nthree = 3\nassert __main__.three == sys.modules[__name__].three == 3",
    "its names": "four = 4\nassert globals()['four'] == 4 and __builtins__.len('x') == 1 and __spec__ is None",
    "its source": "import inspect\ndef five():\n    return 5\nassert 'return 5' in inspect.getsource(five)",
    "its home": "from pathlib import Path\n"
    "assert Path.home().is_dir() and Path('~/x').expanduser().parent == Path.home()",
    "writes at home": "import os\nwith open(os.path.expanduser('~/.rc'), 'w') as f:\n    f.write('x')",
    "its user": "import getpass, os; assert getpass.getuser() == os.environ['USER']",
    "its environment": "import os\nos.environ['X'] = 'y'\nassert os.getenv('X') == 'y' and os.getpid() > 0",
    # Objects of its classes.
    "pickle": "import pickle\nclass A:\n    x = 1\nassert pickle.loads(pickle.dumps(A())).x == 1",
    "pickle of a record": "import pickle\nfrom dataclasses import dataclass\n@dataclass(frozen=True)\nclass R:\n"
    "    x: int\nassert pickle.loads(pickle.dumps({R(1): [R(2)]})) == {R(1): [R(2)]}",
    "pickle of a choice": "import pickle\nfrom enum import Enum\nclass E(Enum):\n    A = 1\n"
    "assert pickle.loads(pickle.dumps(E.A)) is E.A",
    "copies": "import copy\nclass B:\n    def __init__(self):\n        self.x = [1]\n"
    "assert copy.deepcopy(B()).x == [1]",
    "annotations": "def six(x: int) -> str: ...\nassert six.__annotations__ == {'x': int, 'return': str}",
    "types that refer to each other": "import typing\nclass N:\n    next: typing.Optional['N'] = None\n"
    "assert typing.get_type_hints(N)['next'] == typing.Optional[N]",
    "dispatch by type": "import functools\n@functools.singledispatch\ndef kind(x):\n    return 'other'\n"
    "@kind.register\ndef _(x: int):\n    return 'int'\nassert kind(1) == 'int'",
    "a protocol": "from typing import Protocol, runtime_checkable\n@runtime_checkable\nclass Sized(Protocol):\n"
    "    def __len__(self) -> int: ...\nassert isinstance([], Sized)",
    "a generic class": "from typing import Generic, TypeVar\nT = TypeVar('T')\nclass Box(Generic[T]):\n"
    "    def __init__(self, x: T): self.x = x\nassert Box[int](1).x == 1",
    "an abstract class": "import abc\nclass Shape(abc.ABC):\n    @abc.abstractmethod\n    def area(self): ...\n"
    "try:\n    Shape()\nexcept TypeError:\n    pass",
    # The standard library.
    "settrace": "import sys; sys.settrace(None); sys.setprofile(None); assert sys.gettrace() is None",
    "recursion": "import sys\nsys.setrecursionlimit(20_000)\ndef down(n):\n    return n and down(n - 1)\n"
    "assert down(9_000) == 0",
    "warnings": "import warnings\nwith warnings.catch_warnings(record=True) as w:\n"
    "    warnings.simplefilter('always')\n"
    "    warnings.warn('x')\nassert len(w) == 1",
    "logging": "import logging\nlogging.basicConfig(level=logging.INFO, filename='own.log')\nlogging.info('x')\n"
    "assert 'x' in open('own.log').read()",
    "a signal": "import signal\nseen = []\nsignal.signal(signal.SIGUSR1, lambda *a: seen.append(a))\n"
    "signal.raise_signal(signal.SIGUSR1)\nassert seen",
    "a signal to itself": "import os, signal\ngot = []\nsignal.signal(signal.SIGUSR2, lambda *a: got.append(a))\n"
    "os.kill(os.getpid(), signal.SIGUSR2)\nassert got",
    "an alarm": "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_DFL)\nsignal.alarm(5)\nsignal.alarm(0)",
    "a thread": "import threading\nlock, n = threading.Lock(), [0]\ndef add():\n    with lock:\n        n[0] += 1\n"
    "ts = [threading.Thread(target=add) for _ in range(3)]\n[t.start() for t in ts]\n[t.join() for t in ts]\n"
    "assert n == [3]",
    "a queue": "import queue, threading\nq = queue.Queue()\n"
    "threading.Thread(target=q.put, args=(1,), daemon=True).start()\n"
    "assert q.get(timeout=5) == 1",
    "memory of calls": "import functools\n@functools.lru_cache(None)\ndef fib(n):\n"
    "    return n if n < 2 else fib(n - 1) + fib(n - 2)\nassert fib(50) == 12586269025",
    "collections": "from collections import Counter, OrderedDict, defaultdict, deque\nd = defaultdict(list)\n"
    "d['a'].append(1)\nassert Counter('aab').most_common(1) == [('a', 2)] and deque([1, 2], 1) == deque([2])",
    "patterns": "import re; assert re.sub(r'(\\w+) (\\w+)', r'\\2 \\1', 'a b') == 'b a'",
    "seeds": "import random\nrandom.seed(0)\na = random.random()\nrandom.seed(0)\nassert a == random.random()",
    "iterators": "import heapq, itertools, operator\n"
    "assert list(itertools.accumulate([1, 2, 3], operator.mul)) == [1, 2, 6]\n"
    "assert heapq.nsmallest(1, [3, 1]) == [1]",
    "dates": "import datetime, time, zoneinfo\nassert datetime.date(2024, 2, 29).isoformat() == '2024-02-29'\n"
    "assert time.localtime().tm_year > 2000",
    "numbers": "from decimal import Decimal\nfrom fractions import Fraction\n"
    "assert Decimal('0.1') + Decimal('0.2') == Decimal('0.3') and Fraction(1, 3) * 3 == 1",
    "texts": "import hashlib, io, json, string, textwrap\nassert json.loads(json.dumps({'é': [1]})) == {'é': [1]}\n"
    "assert len(hashlib.sha256(b'').hexdigest()) == 64 and io.StringIO('x').read() == 'x'",
    "a captured output": "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n"
    "    print('é')\n"
    "assert out.getvalue() == 'é\\n'",
    "mocks": "from unittest import mock\nwith mock.patch('builtins.input', return_value='7'):\n"
    "    assert input() == '7'",
    "a traceback": "import sys, traceback\ntry:\n    {}['x']\nexcept KeyError:\n"
    "    assert \"{}['x']\" in traceback.format_exc() and sys.exc_info()[0] is KeyError",
    "the machine": "import gc, os, platform, shutil, sys, time\n"
    "assert platform.system() and os.cpu_count() and sys.version_info\n"
    "gc.collect(), time.perf_counter(), shutil.get_terminal_size(), platform.node()",
}  # fmt: skip
WITHOUT_WALLS = {"imports much": HONEST["imports much"].replace("ctypes.util, ", "").replace("sqlite3, ", "")}
"""What is written otherwise where only the hook stands."""
