"""Numeric evaluation of a tree to high precision with a running error bound."""

from __future__ import annotations

import hashlib
import operator
import time
from collections.abc import Callable
from fractions import Fraction

from atts.evaluators.equivalence.approx import (
    MAX_MAGNITUDE,
    NOTHING,
    Approx,
    Arithmetic,
    is_complex,
    is_negative,
    magnitude,
)
from atts.evaluators.equivalence.exact import Environment, NotRational, digits_in_base, exact
from atts.evaluators.equivalence.functions import FUNCTIONS
from atts.evaluators.syntax.tree import MINUS_ONE, OTHERWISE, Node, variables
from atts.evaluators.verdict import Enormous, Limits, Outside, TooLarge, Undecided, Undefined


class Evaluator(Arithmetic):
    """Evaluates trees under one environment at one precision; raises Undecided where it cannot."""

    def __init__(self, bits: int, limits: Limits, env: Environment, deadline: float) -> None:
        super().__init__(bits)
        self.limits = limits
        self.env = env
        self.deadline = deadline
        self.steps = 0

    def value(self, node: Node) -> Approx:
        """The value of a tree with its error bound."""
        self.steps += 1
        if self.steps > self.limits.steps or (self.steps % 64 == 0 and time.thread_time() > self.deadline):
            raise TooLarge("numeric evaluation takes too long")
        rule = _RULES.get(node.kind)
        if rule is None:
            raise Undecided(f"no number for a {node.kind}")
        try:
            return self.checked(rule(self, node))
        except (ZeroDivisionError, ValueError) as error:  # mpmath's own words for a pole
            raise Undefined(f"no value: {error}") from error

    def checked(self, result: Approx) -> Approx:
        if not self.mp.isfinite(result.value):
            raise Undefined("not finite")
        if abs(result.magnitude) > MAX_MAGNITUDE and result.magnitude != NOTHING:
            raise Enormous("a number of enormous size")
        return result

    # -- leaves and arithmetic -------------------------------------------------------------

    def number(self, node: Node) -> Approx:
        assert node.value is not None
        return self.rational(node.value)

    def symbol(self, node: Node) -> Approx:
        bound = self.env.get(node.text)
        if bound is None:
            raise Undecided(f"no value for {node.text}")
        return self.rational(bound)

    def constant(self, node: Node) -> Approx:
        if node.text == "i":
            return Approx(self.mp.mpc(0, 1), NOTHING)
        if node.text == "inf":
            raise Undecided("infinity in an expression")
        number = +(self.mp.pi if node.text == "pi" else self.mp.e)
        return Approx(number, 3 - self.bits)

    def add(self, node: Node) -> Approx:
        total, error = self.mp.mpf(0), NOTHING
        sizes: set[int] = set()
        for index, arg in enumerate(node.args):
            term = self.value(arg)
            total += term.value
            sizes.add(term.magnitude)
            error = max(error, term.error, magnitude(total) - self.bits) + (1 if index < 8 or index % 8 == 0 else 0)
        sizes.discard(NOTHING)
        if sizes:
            self.widen(max(sizes) - min(sizes))
        return Approx(total, error)

    def mul(self, node: Node) -> Approx:
        total = Approx(self.mp.mpf(1), NOTHING)
        for arg in node.args:
            total = self.times(total, self.value(arg))
        return total

    def pow(self, node: Node) -> Approx:
        base, exponent = node.args
        power = self.exponent(exponent)
        left = self.value(base)
        whole = isinstance(power, Fraction) and power.denominator == 1
        if not whole and is_negative(left.value) and not left.may_vanish and variables(exponent):
            raise Undefined("a varying power of a negative number")
        if isinstance(power, Fraction):
            self.widen(power.denominator.bit_length())
            return self.rational_power(left, power)
        self.widen(-power.magnitude)
        if left.magnitude == NOTHING:
            raise Undefined("a power of zero")
        return self.exp(self.times(power, self.ln(left)))

    def exponent(self, node: Node) -> Fraction | Approx:
        try:
            return exact(node, self.limits, self.env)
        except NotRational:
            return self.value(node)

    def root(self, node: Node) -> Approx:
        index = self.exponent(node.args[1])
        base = self.value(node.args[0])
        if isinstance(index, Approx):
            return self.exp(self.times(self.inverse(index), self.ln(base)))
        if index == 0:
            raise Undefined("a root of index zero")
        return self.rational_power(base, 1 / index)

    def percent(self, node: Node) -> Approx:
        return self.times(self.value(node.args[0]), self.rational(Fraction(1, 100)))

    def degree(self, node: Node) -> Approx:
        radians = self.times(self.constant(Node("constant", text="pi")), self.rational(Fraction(1, 180)))
        return self.times(self.value(node.args[0]), radians)

    def based(self, node: Node) -> Approx:
        return self.rational(Fraction(digits_in_base(node)))

    def cases(self, node: Node) -> Approx:
        """The value of the first case that applies."""
        for value, condition in zip(node.args[::2], node.args[1::2], strict=True):
            if self.holds(condition):
                return self.value(value)
        raise Outside("no case applies")

    def holds(self, condition: Node) -> bool:
        """Whether a condition is true here; raises Undecided for what is not one in numbers."""
        if condition.kind == "list" and condition.text != "mixed":
            return (any if condition.text == "or" else all)(self.holds(part) for part in condition.args)
        if condition == OTHERWISE:
            return True
        if condition.kind != "relation":
            raise Undecided("a condition in words")
        signs = condition.text.split()
        return all(self.compare(a, s, b) for a, s, b in zip(condition.args, signs, condition.args[1:], strict=False))

    def compare(self, left: Node, sign: str, right: Node) -> bool:
        if right.kind == "congruence" and sign in ("=", "!="):
            turns = self.difference(left, right.args[0]) / exact(right.args[1], self.limits, self.env)
            return (turns.denominator == 1) == (sign == "=")
        if sign not in _ORDERS:
            raise Undecided(f"the condition {sign}")
        return _ORDERS[sign](self.difference(left, right), 0)

    def difference(self, left: Node, right: Node) -> Fraction:
        """A difference as a fraction, or of its sign alone."""
        node = Node("add", (left, Node("mul", (MINUS_ONE, right))))
        try:
            return exact(node, self.limits, self.env)
        except NotRational:
            gap = self.value(node)
        if gap.may_vanish or is_complex(gap.value):
            raise Undecided("a condition too close to call")
        return Fraction(1 if gap.value.real > 0 else -1)

    def call(self, node: Node) -> Approx:
        """An unknown function: a reproducible arbitrary number for each name and argument."""
        parts = [self.value(arg) for arg in node.args]
        key = node.text + "".join("/" + self.mp.nstr(part.value, 40) for part in parts)
        digest = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
        return self.rational(Fraction(digest, 1 << 62))

    # -- functions -------------------------------------------------------------------------

    def func(self, node: Node) -> Approx:
        if node.text in ("floor", "ceil", "factorial", "double_factorial", "binom", "gcd", "lcm"):
            return self.discrete(node)
        args = [self.value(arg) for arg in node.args]
        if node.text in ("max", "min"):
            return (max if node.text == "max" else min)(args, key=lambda item: self.mp.re(item.value))
        rule = FUNCTIONS.get(node.text)
        if rule is None:
            raise Undecided(f"the function {node.text}")
        size = args[0].magnitude
        if size != NOTHING:  # how near to a constant a function comes there
            self.widen(3 << min(2 * size, 20) if node.text in ("tanh", "coth", "erf") and size > 0 else 2 * abs(size))
        return rule(self, args[0])

    def discrete(self, node: Node) -> Approx:
        """Functions of integers: exact when their arguments are; floor and ceiling by a guarded rounding otherwise."""
        try:
            return self.rational(exact(node, self.limits, self.env))
        except NotRational:
            pass
        args = [self.value(arg) for arg in node.args]
        if node.text in ("floor", "ceil"):
            return self.stepped(node.text, args[0])
        raise Undecided(f"the function {node.text}")

    def stepped(self, name: str, item: Approx) -> Approx:
        if is_complex(item.value):
            raise Undecided("a step of a complex number")
        nearest = self.mp.nint(item.value)
        if magnitude(nearest - item.value) <= item.error + 8:
            if item.error > 16 - self.bits + max(item.magnitude, 0):
                raise Undecided("a step too close to call")
            return Approx(nearest, NOTHING)
        return Approx((self.mp.floor if name == "floor" else self.mp.ceil)(item.value), NOTHING)


_ORDERS: dict[str, Callable[[Fraction, int], bool]] = {
    "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "=": operator.eq, "!=": operator.ne,
}  # fmt: skip
_RULES: dict[str, Callable[[Evaluator, Node], Approx]] = {
    "number": Evaluator.number, "symbol": Evaluator.symbol, "constant": Evaluator.constant, "add": Evaluator.add,
    "mul": Evaluator.mul, "pow": Evaluator.pow, "root": Evaluator.root, "percent": Evaluator.percent,
    "degree": Evaluator.degree, "based": Evaluator.based, "cases": Evaluator.cases, "call": Evaluator.call,
    "func": Evaluator.func,
}  # fmt: skip
