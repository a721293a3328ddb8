"""Every value that crosses a package border: back from JSON as it was, unknown keys refused, frozen."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator, ValidationError
from pydantic.fields import FieldInfo

from upshift.errors import RequestError
from upshift.hardware import Cpu, Gpu, Host
from upshift.launching.request import HostJob, Launch
from upshift.launching.upshift_server import ServerJob
from upshift.launching.vllm_server import VllmJob
from upshift.planning.optimizers import optimizers
from upshift.planning.plan import Plan
from upshift.planning.workload import LengthHistogram
from upshift.value import Value
from upshift.xla.training.arguments import NOT_USED, XlaArguments

SOURCE = Path(__file__).parents[2] / "src"
MAX_ITEMS = 2  # of a generated tuple or dict; a ModelProfile nests five deep

# Imports every module with torch, transformers and tensorflow refused, and prints the values that could still be imported.
FIND = """
import importlib, inspect, json, sys
from pathlib import Path
class Refused(ImportError): pass
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "tensorflow", "peft"):
            raise Refused(name)
sys.meta_path.insert(0, Refuse())
sys.path.insert(0, sys.argv[1])
from upshift.value import Value
found, broken = set(), []
source = Path(sys.argv[1])
for file in sorted(source.glob("upshift/**/*.py")):
    name = ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
    if file.stem == "__main__":
        continue
    try:
        module = importlib.import_module(name)
    except Refused:
        continue
    except Exception as error:
        broken.append(f"{name}: {error!r}")
        continue
    for cls in vars(module).values():
        if inspect.isclass(cls) and issubclass(cls, Value) and cls is not Value and cls.__module__ == name:
            found.add((name, cls.__qualname__))
print(json.dumps({"found": sorted(found), "broken": broken}))
"""


def find() -> tuple[list[type[Value]], list[str]]:
    command = [sys.executable, "-c", FIND, str(SOURCE)]
    answer = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return [getattr(importlib.import_module(module), name) for module, name in answer["found"]], answer["broken"]


VALUES, BROKEN = find()


def numbers(kind: type[int] | type[float], bounds: list[Any]) -> st.SearchStrategy[Any]:
    """Integers of 64 bits, or finite floats, within annotated bounds."""
    low: Any = None
    high: Any = None
    open_low = open_high = False
    for bound in bounds:
        if isinstance(bound, annotated_types.Ge | annotated_types.Gt):
            low, open_low = getattr(bound, "ge", getattr(bound, "gt", None)), isinstance(bound, annotated_types.Gt)
        elif isinstance(bound, annotated_types.Le | annotated_types.Lt):
            high, open_high = getattr(bound, "le", getattr(bound, "lt", None)), isinstance(bound, annotated_types.Lt)
        else:
            raise TypeError(f"no strategy for the bound {bound!r}")
    if kind is int:
        least = -(2**63) if low is None else low + open_low
        return st.integers(least, 2**63 - 1 if high is None else high - open_high)
    edges = {"exclude_min": open_low, "exclude_max": open_high}
    return st.floats(low, high, allow_nan=False, allow_infinity=False, **edges)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | numbers(int, []) | numbers(float, []) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=MAX_ITEMS) | st.dictionaries(st.text(max_size=5), inner, max_size=MAX_ITEMS),
    max_leaves=4,
)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=10),
    bool: st.booleans(),
    Path: st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=10).map(Path),  # what UTF-8 can say
    Any: JSON_VALUES,
    types.NoneType: st.none(),
    None: st.none(),
}


def bounds_of(annotations: tuple[Any, ...]) -> list[Any]:
    """The numeric bounds of an Annotated, whose Field carries its own."""
    fields = [item.metadata if isinstance(item, FieldInfo) else [item] for item in annotations]
    return [bound for bounds in fields for bound in bounds]


def of(annotation: Any, bounds: list[Any] | None = None) -> st.SearchStrategy[Any]:
    """Instances of any annotation that a value uses; an annotation it does not know is an error, not a guess."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return of(arguments[0], bounds_of(arguments[1:]))
    if annotation in (int, float):
        return numbers(annotation, bounds or [])
    if origin in (Union, types.UnionType):
        return st.one_of([of(part, bounds if part in (int, float) else None) for part in arguments])
    if origin is tuple and arguments[-1] is Ellipsis and all(isinstance(bound, annotated_types.MinLen) for bound in bounds or []):
        fewest = max((bound.min_length for bound in bounds or []), default=0)
        return st.lists(of(arguments[0]), min_size=fewest, max_size=fewest + MAX_ITEMS).map(tuple)
    if annotation is str and bounds and all(isinstance(bound, AfterValidator) for bound in bounds):
        texts = PLAIN[str]
        for bound in bounds:
            texts = texts.map(bound.func)
        return texts
    if bounds:
        raise TypeError(f"no strategy for {annotation!r} with {bounds}")
    if annotation in PLAIN:
        return PLAIN[annotation]
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (tuple, list, dict):
        return container(origin, arguments)
    if isinstance(annotation, type) and issubclass(annotation, Value):
        return st.deferred(lambda: instances(annotation))
    if isinstance(annotation, type) and issubclass(annotation, tuple):  # a NamedTuple, such as Polynomial
        return st.builds(annotation, **{name: of(hint) for name, hint in get_type_hints(annotation).items()})
    raise TypeError(f"no strategy for {annotation!r}; add one")


def container(origin: Any, arguments: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    if origin is dict:
        return st.dictionaries(of(arguments[0]), of(arguments[1]), max_size=MAX_ITEMS)
    if origin is list:
        return st.lists(of(arguments[0]), max_size=MAX_ITEMS)
    return st.tuples(*map(of, arguments))


NAMES = st.from_regex(r"[a-z][a-z0-9]{0,9}", fullmatch=True)
SHARES = st.floats(0, 0.9) | st.integers(0, 99)  # or whole numbers
BY_FIELD: dict[str, st.SearchStrategy[Any]] = {  # of fields that refuse most values of their type
    "lora_target": st.lists(NAMES, min_size=1, max_size=MAX_ITEMS).map(tuple) | st.just((r".*\.(q|v)_proj",)),
    "chat_template": st.none() | st.just("{{ messages }}"),
    "eval_size": st.none() | SHARES.map(float),
    "dpo_loss": st.sampled_from(["sigmoid", "ipo", "sft=0.5,sigmoid=2"]),
    "eval_steps": SHARES,
    "save_steps": SHARES,
}


def fields_of(cls: type[Value], **instead: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    strategies = {name: of(field.annotation, field.metadata) for name, field in cls.model_fields.items()}
    by_field = {name: strategy for name, strategy in BY_FIELD.items() if name in cls.model_fields}
    return st.fixed_dictionaries({**strategies, **by_field, **instead})


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    """A host with equal GPUs, with mixed ones, or with a CPU only."""
    gpus, mixed = draw(st.integers(0, 2)), draw(st.booleans())
    parts: dict[str, st.SearchStrategy[Any]] = {
        "cpu": instances(Cpu) if gpus == 0 else st.none() | instances(Cpu),
        "gpus_per_node": st.just(gpus),
        "gpu": instances(Gpu) if gpus and not mixed else st.none(),
        "mixed_gpus": st.tuples(*[instances(Gpu)] * (gpus if mixed else 0)),
    }
    return Host(**draw(fields_of(Host, **parts)))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    return Plan(**draw(fields_of(Plan, optim=st.sampled_from([*optimizers()]))))


@st.composite
def xla_arguments(draw: st.DrawFn) -> XlaArguments:
    unused = {name: st.just(XlaArguments.model_fields[name].default) for name in NOT_USED}  # anything else is refused
    return XlaArguments(**draw(fields_of(XlaArguments, **unused)))


@st.composite
def histograms(draw: st.DrawFn) -> LengthHistogram:
    pairs = draw(st.lists(st.tuples(st.integers(1, 2**20), st.integers(1, 2**40)), min_size=1, max_size=5))
    lengths, counts = zip(*pairs, strict=True)
    instead = {"lengths": st.just(lengths), "counts": st.just(counts)}
    return LengthHistogram(**draw(fields_of(LengthHistogram, **instead)))


LABELS = st.lists(st.tuples(NAMES, NAMES), max_size=MAX_ITEMS).map(tuple)
HOST_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "name": NAMES, "memory": st.none() | st.just("64Gi"), "environment": LABELS, "node_selector": LABELS,
}  # fmt: skip


def host_jobs() -> st.SearchStrategy[HostJob]:
    return fields_of(HostJob, **HOST_FIELDS).map(lambda fields: HostJob(**fields))


def server_jobs() -> st.SearchStrategy[ServerJob]:
    instead = {**HOST_FIELDS, "gpus": st.just(0), "port": st.integers(1, 2**16 - 1)}
    return fields_of(ServerJob, **instead).map(lambda fields: ServerJob(**fields))


def vllm_jobs() -> st.SearchStrategy[VllmJob]:
    engine_arguments = st.lists(st.tuples(NAMES, st.integers(0, 9) | NAMES), max_size=MAX_ITEMS).map(tuple)
    instead = {**HOST_FIELDS, "port": st.integers(1, 2**16 - 1), "arguments": engine_arguments}
    return fields_of(VllmJob, **instead).map(lambda fields: VllmJob(**fields))


@st.composite
def launches(draw: st.DrawFn) -> Launch:
    least, more = draw(st.integers(1, 9)), draw(st.integers(0, 9))
    instead = {
        **HOST_FIELDS, "train": st.lists(NAMES, max_size=MAX_ITEMS).map(lambda words: ("train", *words)),
        "hosts": st.lists(NAMES.filter(lambda name: name != "localhost"), max_size=MAX_ITEMS, unique=True).map(tuple),
        "min_nodes": st.just(least), "max_nodes": st.just(least + more),
    }  # fmt: skip
    return Launch(**draw(fields_of(Launch, **instead)))


SPECIAL: dict[type[Value], Callable[[], st.SearchStrategy[Any]]] = {
    Host: hosts, HostJob: host_jobs, Launch: launches, LengthHistogram: histograms, Plan: plans, ServerJob: server_jobs,
    VllmJob: vllm_jobs, XlaArguments: xla_arguments,
}  # fmt: skip


@cache
def instances(cls: type[Value]) -> st.SearchStrategy[Any]:
    """Valid instances; where fields must agree with each other, those that do."""
    if cls in SPECIAL:
        return SPECIAL[cls]()
    return fields_of(cls).map(lambda fields: valid(cls, fields)).filter(lambda value: value is not None)


def valid(cls: type[Value], fields: dict[str, Any]) -> Value | None:
    try:
        return cls(**fields)
    except RequestError:
        return None
    except ValidationError as error:
        if all(problem["type"] == "value_error" for problem in error.errors()):  # a check of the class's own
            return None
        raise


every_value = pytest.mark.parametrize("cls", VALUES, ids=lambda cls: f"{cls.__module__}.{cls.__qualname__}")
few = settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
MOST_OF_NESTED = 3  # values of a class that holds others, which have 10 of their own
one = settings(few, max_examples=1)


def holds_others(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, Value):
        return True
    return any(holds_others(part) for part in get_args(annotation))


def test_every_light_module_imports() -> None:
    assert BROKEN == []


def test_the_nouns_are_found() -> None:
    assert {"Host", "ModelProfile", "Workload", "Plan", "Record"} <= {cls.__name__ for cls in VALUES}


@every_value
def test_json_round_trip(cls: type[Value]) -> None:
    nested = any(holds_others(field.annotation) for field in cls.model_fields.values())

    @settings(few, max_examples=MOST_OF_NESTED if nested else few.max_examples)
    @given(instances(cls))
    def check(value: Value) -> None:
        assert cls.from_json(value.to_json()) == value
        assert cls.from_json(value.to_json(indent=2)) == value
        assert cls.from_json(json.dumps(json.loads(value.to_json()))) == value  # through any other JSON library

    check()


@every_value
@one
@given(data=st.data())
def test_frozen_and_unknown_keys_refused(cls: type[Value], data: st.DataObject) -> None:
    value = data.draw(instances(cls))
    refuses_unknown_keys(cls, json.loads(value.to_json()))
    for name in cls.model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(value, name, getattr(value, name))
    with pytest.raises(ValidationError):
        value.no_such_field = 1
    with pytest.raises(TypeError):
        cls(*(getattr(value, name) for name in cls.model_fields))  # keywords only
    assert value.changed() == value


def refuses_unknown_keys(cls: type[Value], document: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        cls.from_json(json.dumps({**document, "no_such_key": 1}), origin="the file")
    message = str(refused.value)
    assert message.startswith(f"the file is not a valid {cls.__name__}: unknown key 'no_such_key'")
    assert message.endswith("the keys are " + ", ".join(sorted(cls.model_fields)))
    assert "\n" not in message


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "1e999", '{"p20": 1, "p50": "one", "p80": 3}', '{"p20": NaN}'])
def test_damaged_text_is_one_line(text: str) -> None:
    cls = next(cls for cls in VALUES if cls.__name__ == "Spread")
    with pytest.raises(RequestError) as refused:
        cls.from_json(text, origin="the file")
    assert str(refused.value).startswith("the file is not a valid Spread: ") and "\n" not in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot read .*no.json: No such file or directory; give the path of a Host"):
        Host.from_file(tmp_path / "no.json")
