"""Worker process: reads questions as JSON lines, answers them with sympy, imports nothing of ours."""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import IO, Any

import sympy

Tree = list[Any]  # [kind, text, value or None, children]
Reply = dict[str, str]

_TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")
_NAMES = {
    "ln": "log", "abs": "Abs", "ceil": "ceiling", "double_factorial": "factorial2", "binom": "binomial", "max": "Max",
    "min": "Min", **{f"arc{name}": f"a{name}" for name in _TRIGONOMETRIC},
}  # fmt: skip
_SAME = (*_TRIGONOMETRIC, "coth", "sech", "csch", "floor", "factorial", "sign", "re", "im", "arg", "erf", "gcd", "lcm")
_FUNCTIONS = {ours: getattr(sympy, theirs) for ours, theirs in (_NAMES | {name: name for name in _SAME}).items()}


class Unsupported(Exception):
    """The tree holds something that is not handed to sympy."""


def expression(tree: Tree) -> Any:
    """A sympy expression for a tree, built node by node; no text is ever parsed. Raises Unsupported."""
    kind, text, value, children = tree
    if kind == "number" and value is not None:
        return sympy.Rational(*(int(part) for part in value.split("/")))
    if kind == "symbol":
        return sympy.Symbol(text, real=True)
    if kind == "constant":
        return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "inf": sympy.oo}[text]
    args = [expression(child) for child in children]
    rule = _RULES.get(kind)
    if rule is None:
        raise Unsupported(kind)
    return rule(text, args)


def _function(text: str, args: list[Any]) -> Any:
    if text == "log":
        return sympy.log(args[0]) / sympy.log(10)
    if text not in _FUNCTIONS:
        raise Unsupported(text)
    return _FUNCTIONS[text](*args)


def _root(text: str, args: list[Any]) -> Any:
    radicand, index = args
    if index.is_Integer and index % 2 and radicand.is_negative:
        return -sympy.root(-radicand, index)
    return sympy.root(radicand, index)


def _series(text: str, args: list[Any]) -> Any:
    body, variable, low, high = args
    return (sympy.Sum if text == "sum" else sympy.Product)(body, (variable, low, high)).doit()


def _calculus(text: str, args: list[Any]) -> Any:
    if text == "lim":
        return sympy.limit(args[0], args[1], args[2])
    if text == "int":
        return sympy.integrate(args[0], tuple(args[1:]) if len(args) > 2 else args[1])
    raise Unsupported(text)


_RULES: dict[str, Callable[[str, list[Any]], Any]] = {
    "add": lambda text, args: sympy.Add(*args),
    "mul": lambda text, args: sympy.Mul(*args),
    "pow": lambda text, args: sympy.Pow(*args),
    "root": _root,
    "func": _function,
    "percent": lambda text, args: args[0] / 100,
    "degree": lambda text, args: args[0] * sympy.pi / 180,
    "quantity": lambda text, args: args[0],
    "sum": _series,
    "opaque": _calculus,
}


def by_sympy(gold: Tree, answer: Tree) -> Reply:
    """Whether two trees are the same expression to sympy: simplified, then in numbers."""
    difference = expression(gold) - expression(answer)
    if difference == 0 or sympy.simplify(difference) == 0:
        return {"status": "equal", "rule": "sympy"}
    if difference.is_number:
        size = abs(sympy.N(difference, 50, maxn=400))
        if size.is_Float or size.is_Integer or size.is_Rational:
            if size > sympy.Rational(1, 10**20):
                return {"status": "different", "rule": "sympy"}
        return {"status": "unscored", "rule": "undecided", "detail": "not shown to be zero"}
    verdict = difference.equals(0)
    if verdict is None:
        return {"status": "unscored", "rule": "undecided", "detail": "sympy does not decide"}
    return {"status": "equal" if verdict else "different", "rule": "sympy"}


def by_math_verify(gold: str, answer: str) -> Reply:
    """math-verify's opinion, without its timeouts: this process has its own end."""
    library: Any = importlib.import_module("math_verify")
    one, two = (library.parse(f"${text}$", parsing_timeout=None) for text in (gold, answer))
    if not one or not two:
        return {"status": "unscored", "rule": "undecided", "detail": "math-verify does not parse it"}
    same = library.verify(one, two, timeout_seconds=None)
    return {"status": "equal" if same else "different", "rule": "math-verify"}


def reply(question: dict[str, Any]) -> Reply:
    """The verdict on one question: sympy on the trees, then math-verify on the texts where it is wanted."""
    found: Reply = {"status": "unscored", "rule": "undecided", "detail": "no tree to compare"}
    try:
        if question["gold_tree"] and question["answer_tree"]:
            found = by_sympy(question["gold_tree"], question["answer_tree"])
    except Unsupported as error:
        found = {"status": "unscored", "rule": "undecided", "detail": f"not for sympy: {error}"}
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # noqa: BLE001  # sympy raises whatever it likes; the verdict says so
        found = {"status": "unscored", "rule": "undecided", "detail": f"sympy: {type(error).__name__}"}
    if found["status"] != "unscored" or not question["math_verify"]:
        return found
    return by_math_verify(question["gold"], question["answer"])


def confine(megabytes: int) -> None:
    """Let this process grow to `megabytes` of resident memory, write no file and leave no core; POSIX only."""
    if importlib.util.find_spec("resource") is None:
        return
    import resource

    page = resource.getpagesize()
    room = megabytes << 20
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm", encoding="ascii") as file:
            size, resident = (int(word) * page for word in file.read().split()[:2])
        room = size + max(room - resident, 32 << 20)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the process that forked this one
        resource.setrlimit(resource.RLIMIT_AS, (room, room))


def serve(questions: IO[str], answers: IO[str]) -> int:
    """Answer line by line until the input ends; memory that runs out is said, then the process ends."""
    for line in questions:
        try:
            found = reply(json.loads(line))
        except MemoryError:
            found = {"status": "unscored", "rule": "memory", "detail": "the worker's memory limit"}
        except RecursionError:
            found = {"status": "unscored", "rule": "undecided", "detail": "too deep for sympy"}
        except Exception as error:  # noqa: BLE001  # math-verify raises whatever it likes; the verdict says so
            found = {"status": "unscored", "rule": "undecided", "detail": f"math-verify: {type(error).__name__}"}
        say(answers, json.dumps(found))
        if found["rule"] == "memory":
            return 1
    return 0


def say(answers: IO[str], line: str) -> None:
    """One line to the other side, at once."""
    answers.write(line + "\n")
    answers.flush()


def nurse(megabytes: int, answers: IO[str]) -> int:
    """Keep the libraries loaded in this process and fork a child to work; when one dies, fork the next.

    A child that is killed is so replaced in milliseconds. When the other side goes, the child is ended too, even in
    the middle of its work, and this returns.
    """
    while True:
        reader, writer = os.pipe()  # the child holds the writing end: its death shows here
        parent, child = os.getpid(), os.fork()
        if child == 0:
            os.close(reader)
            confine(megabytes)
            if os.getppid() != parent:
                os._exit(1)  # it ended before confine() tied this process to it
            say(answers, f"ready {os.getpid()}")
            with os.fdopen(0, encoding="utf-8", closefd=False) as questions:
                status = serve(questions, answers)
            os._exit(status)
        os.close(writer)
        watch = select.poll()
        watch.register(0, 0)  # nothing but its end
        watch.register(reader, 0)
        if any(source == 0 for source, _ in watch.poll()):
            os.kill(child, signal.SIGKILL)
        os.close(reader)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 or _is_gone(0):
            return 0


def _is_gone(source: int) -> bool:
    """Whether the other side of a pipe has been closed."""
    watch = select.poll()
    watch.register(source, 0)
    return bool(watch.poll(0))


def rehearse() -> None:
    """Ask sympy one question of each kind: it loads much of itself only then, and children inherit it."""
    x = sympy.Symbol("x", real=True)
    sympy.simplify(sympy.integrate(sympy.exp(-(x**2)), (x, 0, sympy.oo)) - sympy.sin(x) ** 2)
    sympy.simplify(sympy.Sum(1 / sympy.factorial(x), (x, 0, sympy.oo)).doit() - sympy.binomial(4, x))
    sympy.limit(sympy.sin(x) / x, x, 0)
    sympy.N(sympy.sqrt(2), 50)


def main() -> int:
    """Serve on the pipes this process was started with; what libraries print goes nowhere."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if sys.argv[2] == "math-verify":
        importlib.import_module("math_verify")  # loaded before memory is confined
    rehearse()
    gc.freeze()
    if hasattr(os, "fork"):
        return nurse(int(sys.argv[1]), answers)
    say(answers, f"ready {os.getpid()}")
    return serve(sys.stdin, answers)


if __name__ == "__main__":
    sys.exit(main())
