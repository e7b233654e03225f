"""Options that do not exist: what there is in their place, in one traceback, and at no cost to those that do."""

import inspect
import typing

import numpy
import pytest

import cupy_flash
from cupy_flash import UnsupportedError, append_kv, attention
from cupy_flash.api import absent
from cupy_flash.api.signature import takes_options

X = numpy.zeros((2, 8, 16), numpy.float16)
FUNCTIONS = [getattr(cupy_flash, name) for name in cupy_flash.__all__ if inspect.isfunction(getattr(cupy_flash, name))]


@pytest.mark.parametrize("name", sorted(absent.MISSING))
def test_what_is_missing_is_said_to_be(name):
    masks = "masks are causal, window, prefix and mask"
    with pytest.raises(UnsupportedError, match=rf"^{name}: .* none for this yet; {masks}; .*merge_states"):
        attention(X, X, X, **{name: 1})


@pytest.mark.parametrize("name, here", absent.ELSEWHERE.items())
def test_other_names_are_translated(name, here):
    with pytest.raises(TypeError, match=f"^{name}: expected an option of attention; ") as caught:
        attention(X, X, X, **{name: True})
    assert str(caught.value).endswith(f"; what it means elsewhere is {here} here")
    assert caught.value.__context__ is None


@pytest.mark.parametrize("name, here", absent.RENAMED.items())
def test_other_names_of_what_a_cache_is_given_are_translated(name, here):
    with pytest.raises(TypeError, match=f"^{name}: expected an option of append_kv; what it means elsewhere is {here} here$"):
        append_kv(X, X, X, X, 0, **{name: True})


@pytest.mark.parametrize("name", absent.PLANNED)
def test_options_of_plans_are_said_to_be_theirs(name):
    answer = f"^{name}: expected an option of attention; plan_attention and plan_attention_backward have it$"
    with pytest.raises(TypeError, match=answer):
        attention(X, X, X, **{name: "90a"})
    assert name in inspect.signature(cupy_flash.plan_attention).parameters


@pytest.mark.parametrize("name, close", [("casual", "causal"), ("soft_cap", "softcap"), ("retrun_lse", "return_lse")])
def test_misspelt_options(name, close):
    with pytest.raises(TypeError, match=f"^{name}: expected an option of attention; {close} is one$"):
        attention(X, X, X, **{name: True})


def test_what_resembles_nothing_gets_the_list():
    with pytest.raises(TypeError, match=r"^zzz: expected an option of attention; there are q, k, v, layout, scale, "):
        attention(X, X, X, zzz=1)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_every_function_answers(function):
    arrays = [p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    with pytest.raises(TypeError, match=f"^is_causal: expected an option of {function.__name__}; "):
        function(*[X] * len(arrays), is_causal=True)


def test_what_python_says_of_other_calls_stays():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'v'"):
        attention(X, X)


def test_no_answer_is_for_an_option_that_exists():
    """But for the names of caches: attention over one has them as k and v."""
    known = {function: set(inspect.signature(function).parameters) for function in FUNCTIONS}
    answered = absent.ELSEWHERE.keys() | absent.RENAMED.keys() | absent.MISSING
    assert not set().union(*(names for function, names in known.items() if function is not append_kv)) & answered
    assert known[append_kv] & answered == {"k_cache", "v_cache"}


@pytest.mark.skipif(not hasattr(typing, "get_overloads"), reason="needs Python 3.11")
@pytest.mark.parametrize("name", ["attention", "attention_vjp"])
def test_overloads_are_the_signature(name):
    """What type checkers are told has the parameters that there are; it differs in return_lse and what is returned."""
    function = inspect.unwrap(getattr(cupy_flash, name))
    overloads = typing.get_overloads(function)
    assert len(overloads) == 3
    expected = inspect.signature(function)
    for overload, value in zip(overloads, ("Literal[False]", "Literal[True]", "bool")):
        found = inspect.signature(takes_options(overload))
        assert [(p.name, p.kind) for p in found.parameters.values()] == [(p.name, p.kind) for p in expected.parameters.values()]
        for parameter in found.parameters.values():
            own = expected.parameters[parameter.name]
            if parameter.name == "return_lse":
                assert parameter.annotation == value
            elif parameter.name != "q":
                assert parameter.annotation == own.annotation
                assert (parameter.default is parameter.empty) == (own.default is own.empty)
