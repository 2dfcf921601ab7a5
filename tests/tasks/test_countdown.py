"""Task countdown: grammar, exact rewards, solver, split, styles, and rewards on the command line."""

from __future__ import annotations

import ast
import itertools
import json
import operator
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from conftest import Cli
from mutualrl.errors import UsageError
from mutualrl.tasks import get_task
from mutualrl.tasks.base import TaskSource
from mutualrl.tasks.countdown import (
    HELD_OUT,
    SIZES,
    STYLES,
    TRAINING,
    CountdownProblem,
    held_out,
    mirrored,
    reached,
    reaches_target,
    training,
)
from mutualrl.tasks.expressions import Expression, ExpressionError, apply, number, parse, solve

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def by_python(text: str) -> Fraction:
    """Evaluate an expression with Python's parser and exact rationals."""

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant):
            return Fraction(node.value)  # type: ignore[arg-type]
        assert isinstance(node, ast.BinOp)
        return OPERATORS[type(node.op)](value(node.left), value(node.right))  # type: ignore[no-any-return]

    return value(ast.parse(text, mode="eval").body)


trees = st.recursive(
    st.integers(1, 50).map(number),
    lambda inner: st.tuples(st.sampled_from("+-*/"), inner, inner),
    max_leaves=7,
)


def build(tree: object) -> Expression:
    if isinstance(tree, Expression):
        return tree
    operation, left, right = tree  # type: ignore[misc]
    return apply(operation, build(left), build(right))


@given(trees)
@settings(max_examples=300, deadline=None)
def test_printed_expression_parses_to_the_same_value_and_numbers(tree: object) -> None:
    try:
        expression = build(tree)
    except ExpressionError:
        assume(False)  # a division by zero; hypothesis draws another, and fails where most are
    parsed = parse(str(expression))
    assert (parsed.value, parsed.numbers) == (expression.value, expression.numbers)
    assert by_python(str(expression)) == expression.value


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), (" ( 3 + 4 ) * 2 ", 14), ("8-3-2", 3), ("8-(3-2)", 7), ("12/4/3", 1), ("1/3*3", 1), ("2+3*4", 14)],
)
def test_precedence_and_associativity_are_standard(text: str, value: int) -> None:
    assert parse(text).value == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unexpected end"),
        ("3+", "unexpected end"),
        ("(3+4", "not closed"),
        ("3+4)", "unexpected '\\)'"),
        ("3 4", "unexpected '4'"),
        ("-3+4", "unexpected '-'"),
        ("3**4", "unexpected '\\*'"),
        ("3//4", "unexpected '/'"),
        ("3.5", "unexpected '.5'"),
        ("x", "unexpected 'x'"),
        ("__import__('os')", "unexpected '__import__'"),
        ("3/(4-4)", "division by zero"),
        ("3+4=7", "unexpected '=7'"),
        ("1234567", "unexpected '7'"),
        ("\u0663", "unexpected"),  # a digit of another script
        ("(" * 150 + "1" + ")" * 150, "characters, at most 200"),
        ("(" * 99 + "1", "not closed"),
    ],
)
def test_anything_else_is_rejected(text: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        parse(text)


def test_completion_is_correct_if_its_last_box_uses_each_number_once_and_reaches_the_target() -> None:
    texts = {
        "4+3=7 \\boxed{(3+4)*2}": True,
        "\\boxed{2*(4+3)}": True,
        "\\boxed{1} no: \\boxed{ (4 + 3) * 2 }": True,
        "\\boxed{7*2}": False,  # a number that is not given
        "\\boxed{(3+4)*2*2/2}": False,  # a number used twice
        "\\boxed{3+4+2}": False,  # another value
        "\\boxed{(3+4)*2": False,
        "(3+4)*2": False,
        "\\boxed{14}": False,
        "": False,
    }
    assert {text: reached(text, [3, 4, 2], 14) for text in texts} == texts
    assert reached("\\boxed{8/(3-8/3)}", [3, 3, 8, 8], 24)  # through a third, exactly
    completions: list[str | list[dict[str, str]]] = [[{"role": "assistant", "content": text}] for text in texts]
    rewards = reaches_target(completions, [[3, 4, 2]] * len(texts), [14] * len(texts), prompts=[])
    assert rewards == [float(correct) for correct in texts.values()]


def test_solver_is_exhaustive_and_exact() -> None:
    solution = solve([3, 3, 8, 8], 24)
    assert solution is not None
    assert (str(solution), solution.value) == ("8/(3-8/3)", 24)
    assert solve([1, 1, 1, 1], 24) is None
    # compare with every expression of three numbers
    shapes = ["{0}{3}{1}{4}{2}", "({0}{3}{1}){4}{2}", "{0}{3}({1}{4}{2})"]
    for numbers in ([1, 5, 7], [2, 2, 9]):
        reachable = set()
        for order, (one, two), shape in itertools.product(
            itertools.permutations(numbers), itertools.product("+-*/", repeat=2), shapes
        ):
            try:
                reachable.add(by_python(shape.format(*order, one, two)))
            except ZeroDivisionError:
                continue
        for target in range(1, 60):
            assert (solve(numbers, target) is not None) == (Fraction(target) in reachable), (numbers, target)


@pytest.mark.parametrize("name", SIZES)
def test_held_out_problems_are_never_trained_on_and_all_are_solvable(name: str) -> None:
    sizes = SIZES[name]
    validation, train, other = held_out(sizes), training(sizes, 0), training(sizes, 1)
    assert len(validation) == HELD_OUT >= 512
    assert len(train) == TRAINING
    assert {len(problem.numbers) for problem in validation} == set(sizes)
    keys = [{problem.key for problem in problems} for problems in (validation, train, other)]
    assert [len(group) for group in keys] == [len(validation), len(train), len(other)]  # no duplicates
    assert not keys[0] & keys[1]
    assert not keys[0] & keys[2]
    assert keys[1] != keys[2]
    for problem in (*validation, *train[:2000]):
        for style in STYLES.values():
            assert reached(style(problem.solution), problem.numbers, problem.target)
        assert 1 <= problem.target <= 99


def test_styles_write_the_same_solution_differently() -> None:
    solution = parse("(3+4)*2-5")
    texts = {name: style(solution) for name, style in STYLES.items()}
    assert texts == {
        "solution": " 4+3=7 7*2=14 14-5=9 \\boxed{(4+3)*2-5}",
        "mirrored": " 3+4=7 2*7=14 14-5=9 \\boxed{2*(3+4)-5}",
        "bare": " \\boxed{(4+3)*2-5}",
    }
    assert CountdownProblem((3, 4, 2, 5), solution).target == 9
    assert mirrored(parse("8-3+2+2")) == " 8-3=5 2+5=7 2+7=9 \\boxed{2+2+8-3}"


def test_each_style_is_a_column_and_the_first_is_the_tasks_solution() -> None:
    prompts = get_task("countdown-three").read("validation", TaskSource()).prompts
    for prompt in prompts[:100]:
        texts = [prompt.columns[style] for style in STYLES]
        assert texts[0] == prompt.solution
        assert texts[2] == texts[0][texts[0].index(" \\boxed") :]
        assert all(reached(text, prompt.columns["numbers"], prompt.columns["target"]) for text in texts)
    with pytest.raises(UsageError, match="makes its own problems"):
        get_task("countdown").read("train", TaskSource(data=Path("x.jsonl")))
    with pytest.raises(UsageError, match=r"'countdown' is rewarded by mutualrl\.tasks\.countdown:reaches_target"):
        get_task("mixture").read("train", TaskSource(members={"countdown": _member()}))


def _member() -> object:
    from mutualrl.tasks.base import MixtureMember

    return MixtureMember(TaskSource())


def test_recipe_and_evaluation_use_the_countdown_reward(cli_here: Cli) -> None:
    output = json.loads(cli_here("train", "--pool", "tiny-countdown", "--dry-run", "--json").stdout)
    assert output["recipe"]["task"]["reward"] == ["mutualrl.tasks.countdown:reaches_target"]
    result = cli_here(
        *("eval", "--pool", "tiny", "--suite", "countdown", "--limit", "3", "--max-new-tokens", "8"),
        *("--engine", "transformers", "--json"),
    )
    assert result.returncode == 0, result.stderr
    task = json.loads(result.stdout)["tasks"]["countdown"]
    assert (task["n"], task["reward"]) == (3, "mutualrl.tasks.countdown:reaches_target")
